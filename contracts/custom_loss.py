"""Custom losses: a graph of operators that the SDK has traced from a user's function, as plain data, checked without torch.

The SDK uploads the graph (``create_custom_loss``) and sends the loss's id with each batch. weft keeps nothing: the id is the
graph itself, compressed. So it outlives every process and needs no table, and a tenant can only run what its request holds.

A graph is run for each datum by ``engine.training.custom_loss``. Nothing of it is code: each node names an operator of the
lists below, and everything else is refused here.
"""

import base64
import binascii
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from contracts.errors import InvalidRequest

MAX_NODES = 512
MAX_INPUTS = 16
MAX_METRICS = 32
MAX_GRAPH_BYTES = 128 * 1024
"""Bytes of a graph as JSON."""
MAX_ID_BYTES = 32 * 1024
"""Bytes of an id, which each request of the loss carries."""
LOGPROBS, TARGETS = "logprobs", "target_tokens"
LOSS_ID = "loss_id"
"""Setting of ``loss_fn_config`` that names the loss."""
_PREFIX = "weft-loss-1."
_FORMAT = 1
_MOST_ARGUMENTS, _DEEPEST, _LONGEST_TEXT, _LARGEST_INTEGER = 64, 6, 100, 2**31
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NON_FINITE = frozenset({"inf", "-inf", "nan"})
_DTYPES = frozenset({"float32", "float64", "int64", "bool"})


class Cost(StrEnum):
    """Rule that bounds an operator's result before it is computed."""

    BROADCAST = "broadcast"
    """The arguments' broadcast shape."""
    SHRINK = "shrink"
    """No more elements than the arguments have together."""
    EXPAND = "expand"
    """The shape that the arguments name."""
    REPEAT = "repeat"
    """The first argument's elements times the numbers after it."""
    PRODUCT = "product"
    """The product of the first two arguments' elements."""
    INDEX = "index"
    """The indexed elements, times the length of each list or tensor of indices."""
    RANGE = "range"
    """A range of numbers."""


def _named(cost: Cost, names: str) -> dict[str, Cost]:
    return dict.fromkeys(names.split(), cost)


def _prefixed(module: str, cost: Cost, names: str) -> dict[str, Cost]:
    return {f"{module}.{name}": cost for name in names.split()}


_TENSORS = (
    _named(
        Cost.BROADCAST,
        "max min abs neg exp expm1 exp2 log log1p log2 log10 sqrt rsqrt reciprocal square sigmoid tanh sin cos erf sign floor"
        " ceil round trunc relu add sub subtract mul multiply div divide true_divide pow maximum minimum clamp clip eq ne lt le"
        " gt ge greater greater_equal less less_equal not_equal logical_and logical_or logical_not logical_xor isfinite isnan"
        " isinf nan_to_num lerp remainder fmod logaddexp masked_fill detach clone where addcmul addcdiv xlogy",
    )
    | _named(
        Cost.SHRINK,
        "sum mean amax amin argmax argmin any all std var norm logsumexp softmax log_softmax cumsum logcumsumexp flip roll"
        " sort argsort median numel unsqueeze squeeze reshape flatten transpose permute narrow select gather tril triu"
        " diagonal nansum nanmean count_nonzero prod cumprod",
    )
    | _named(Cost.PRODUCT, "matmul mm dot outer")
)
METHODS: Mapping[str, Cost] = MappingProxyType(
    _TENSORS
    | _named(Cost.BROADCAST, "float double long bool to type_as contiguous expand_as")
    | _named(Cost.SHRINK, "view size dim t")
    | _named(Cost.EXPAND, "expand")
    | _named(Cost.REPEAT, "repeat")
)
"""Methods of tensors that a graph may call, by name."""
FUNCTIONS: Mapping[str, Cost] = MappingProxyType(
    {f"torch.{name}": cost for name, cost in _TENSORS.items()}
    | _prefixed("torch", Cost.BROADCAST, "zeros_like ones_like full_like")
    | _prefixed("torch", Cost.SHRINK, "cat stack concat")
    | _prefixed("torch", Cost.RANGE, "arange")
    | _prefixed(
        "torch.nn.functional",
        Cost.BROADCAST,
        "softplus logsigmoid log_sigmoid relu sigmoid tanh silu gelu elu leaky_relu huber_loss smooth_l1_loss mse_loss l1_loss"
        " kl_div binary_cross_entropy_with_logits",
    )
    | _prefixed("torch.nn.functional", Cost.SHRINK, "softmax log_softmax")
    | _prefixed(
        "operator",
        Cost.BROADCAST,
        "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert",
    )
    | {"operator.matmul": Cost.PRODUCT, "operator.getitem": Cost.INDEX, "getattr": Cost.SHRINK}
    | _prefixed("math", Cost.SHRINK, "sqrt exp log log1p expm1 tanh fabs")
)
"""Functions that a graph may call, by qualified name."""
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "values", "indices"})
"""Attributes of a tensor, or of a result of two tensors, that a graph may read."""
_KEYWORD_NAMES = (
    "dim keepdim dtype min max correction unbiased descending p exponent alpha beta threshold reduction diagonal offset input"
    " other weight end start step size fill_value value delta shape index dims shifts length nan posinf neginf approximate"
    " negative_slope dim0 dim1 tensors condition rounding_mode start_dim end_dim eps self axis stable log_target"
    " pos_weight"
)
_KEYWORDS = frozenset(_KEYWORD_NAMES.split())
_IDLE: Mapping[str, Any] = MappingProxyType({"size_average": None, "reduce": None, "inplace": False, "_stacklevel": 3})
"""Keywords that torch's own functions pass along, with the values that change nothing. They are dropped."""
_TEXTS = frozenset({"mean", "sum", "batchmean", "none", "tanh", "floor", "trunc"})
"""Texts that an argument may be: how to reduce, to round, to approximate."""
_ALIASES = ("torch._C._nn.", "torch._C._special.", "torch.special.")
"""Modules whose functions the SDK names by the place where torch defines them."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of a graph, in order of execution: its ``cost``, and its arguments in the SDK's encoding."""

    op: str
    name: str
    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A checked custom loss. ``inputs`` are names and ranks, ``logprobs`` first; the last of ``nodes`` is the output."""

    name: str
    inputs: Sequence[tuple[str, int]]
    nodes: Sequence[Node]


def may_name_loss(body: bytes) -> bool:
    """Return whether a request may have a loss's id in it: a few KiB that stand for a graph of ``MAX_GRAPH_BYTES``."""
    # JSON may write any letter as an escape.
    return _PREFIX.encode() in body or b"\\u" in body


def loss_id_of(name: str, inputs: Sequence[Mapping[str, Any]], graph: Mapping[str, Any]) -> str:
    """Return the id of a loss. Raises ``InvalidRequest`` naming the node that is refused."""
    try:
        body = orjson.dumps({"name": name, "inputs": inputs, "graph": graph})
    except TypeError:
        raise InvalidRequest("graph: a number is too large, or the nesting too deep") from None
    _parsed(body)
    found = _PREFIX + base64.urlsafe_b64encode(zlib.compress(body, 9)).decode()
    if len(found) > MAX_ID_BYTES:
        raise InvalidRequest(f"graph: the loss takes {len(found)} bytes; at most {MAX_ID_BYTES} are served")
    return found


def read_custom_loss(loss_id: str) -> CustomLoss:
    """Return the loss of an id. Raises ``InvalidRequest`` for another text, and for a loss that ``loss_id_of`` refuses."""
    try:
        if not loss_id.startswith(_PREFIX) or len(loss_id) > MAX_ID_BYTES:
            raise ValueError(loss_id[:20])
        packed = base64.b64decode(loss_id.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(packed, MAX_GRAPH_BYTES + 1)
        if not unpacking.eof and len(body) <= MAX_GRAPH_BYTES:
            raise ValueError("cut off")
    except (ValueError, binascii.Error, zlib.error):
        raise InvalidRequest(
            f"loss_fn_config.{LOSS_ID} is no id of a custom loss; send the one that create_custom_loss gave"
        ) from None
    return _parsed(body)


def _parsed(body: bytes) -> CustomLoss:
    if len(body) > MAX_GRAPH_BYTES:
        raise InvalidRequest(f"graph: it has {len(body)} bytes; at most {MAX_GRAPH_BYTES} are served")
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise InvalidRequest("graph: it is no JSON") from None
    graph = _mapping(_mapping(found, "loss").get("graph"), "graph")
    if graph.get("format") != _FORMAT:
        raise InvalidRequest(f"graph.format must be {_FORMAT}")
    inputs = list(_inputs(_listed(found.get("inputs"), "inputs", MAX_INPUTS)))
    nodes = [_node(_mapping(one, "nodes")) for one in _listed(graph.get("nodes"), "graph.nodes", MAX_NODES)]
    _check_order(nodes, [name for name, _ in inputs])
    return CustomLoss(_text(found.get("name"), "name"), inputs, nodes)


def _inputs(given: Sequence[Any]) -> Iterator[tuple[str, int]]:
    seen: set[str] = set()
    for place, one in enumerate(given):
        name, rank = _text(_mapping(one, "inputs").get("name"), "inputs.name"), one.get("rank")
        if not _INPUT.fullmatch(name) or name in seen or (name == LOGPROBS) is not (place == 0):
            raise InvalidRequest(f"inputs: {name!r} is no name there; the first is {LOGPROBS}, and each occurs once")
        if type(rank) is not int or not (place == 0) <= rank <= 2:
            raise InvalidRequest(f"inputs: the rank of {name} must be 0, 1 or 2, and that of {LOGPROBS} 1 or 2")
        seen.add(name)
        yield name, rank
    if not seen:
        raise InvalidRequest(f"inputs: the first must be {LOGPROBS}")


def _node(given: Mapping[str, Any]) -> Node:
    name = _text(given.get("name"), "nodes.name")
    op, target = _text(given.get("op"), f"node {name}.op"), _text(given.get("target"), f"node {name}.target")
    for alias in _ALIASES:
        if target.startswith(alias):
            target = f"torch.{'nn.functional.' if alias == _ALIASES[0] else ''}{target.removeprefix(alias)}"
    args = _listed(given.get("args", []), f"node {name}.args", _MOST_ARGUMENTS)
    passed = _mapping(given.get("kwargs", {}), f"node {name}.kwargs")
    kwargs = {key: value for key, value in passed.items() if key not in _IDLE or value != _IDLE[key]}
    node = Node(op, name, target, args, kwargs)
    _check_target(node)
    if unknown := sorted(set(kwargs) - _KEYWORDS):
        raise InvalidRequest(f"graph: node {name} passes {unknown[0][:_LONGEST_TEXT]!r}, which custom losses may not")
    return node


def _check_target(node: Node) -> None:
    lists = {"call_function": FUNCTIONS, "call_method": METHODS}
    if node.op in lists and node.target not in lists[node.op]:
        raise InvalidRequest(f"graph: node {node.name} calls {node.target!r}, which custom losses may not")
    if node.op not in lists and node.op not in ("placeholder", "output"):
        raise InvalidRequest(f"graph: node {node.name} is a {node.op!r}, which custom losses may not have")
    if node.target == "getattr" and (len(node.args) != 2 or node.args[1] not in tuple(ATTRIBUTES)):
        raise InvalidRequest(f"graph: node {node.name} reads an attribute; custom losses may read {sorted(ATTRIBUTES)}")


def _check_order(nodes: Sequence[Node], inputs: Sequence[str]) -> None:
    """Check that placeholders come first and the output last, and that nodes refer to earlier ones only."""
    placeholders = [node.target for node in nodes[: len(inputs)] if node.op == "placeholder"]
    if placeholders != list(inputs) or any(node.op == "placeholder" for node in nodes[len(inputs) :]):
        raise InvalidRequest(f"graph: its first nodes must be placeholders of {', '.join(inputs)}")
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise InvalidRequest("graph: its last node must be its one output")
    known: set[str] = set()
    for node in nodes:
        given = [*node.args[: 1 if node.target == "getattr" else None], *node.kwargs.values()]
        for reference in _references(given, node.name, _DEEPEST):
            if reference not in known:
                raise InvalidRequest(f"graph: node {node.name} refers to {reference!r}, which is no node before it")
        if node.name in known:
            raise InvalidRequest(f"graph: two nodes are called {node.name!r}")
        known.add(node.name)
    outputs(nodes[-1])


def outputs(node: Node) -> tuple[str, dict[str, str]]:
    """Return the names of the loss's node and of each metric's, of an output node. Raises ``InvalidRequest``."""
    (given,) = node.args if len(node.args) == 1 else (None,)
    pair = given.get("tuple") if isinstance(given, dict) else given
    if not isinstance(pair, list) or len(pair) != 2:
        raise InvalidRequest("graph: its output must be a loss and a dict of metrics")
    loss, metrics = pair[0], pair[1].get("dict") if isinstance(pair[1], dict) else None
    if not isinstance(loss, dict) or set(loss) != {"ref"} or not isinstance(metrics, dict):
        raise InvalidRequest("graph: its output must be a loss and a dict of metrics, all of them tensors")
    if len(metrics) > MAX_METRICS:
        raise InvalidRequest(f"graph: it has {len(metrics)} metrics; at most {MAX_METRICS} are served")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name) or not isinstance(value, dict) or set(value) != {"ref"}:
            raise InvalidRequest(
                f"graph: metric {name[:_LONGEST_TEXT]!r} must be a tensor named custom/<name>:sum or :mean"
            )
    return loss["ref"], {name: value["ref"] for name, value in metrics.items()}


def _references(values: Sequence[Any], node: str, depth: int) -> Iterator[str]:
    """Iterate over the names that encoded arguments refer to. Raises ``InvalidRequest`` for what is no argument."""
    if depth == 0 or len(values) > _MOST_ARGUMENTS:
        raise InvalidRequest(f"graph: the arguments of node {node} are too many or too deep")
    for value in values:
        if isinstance(value, list):
            yield from _references(value, node, depth - 1)
        elif isinstance(value, dict):
            yield from _of_object(value, node, depth - 1)
        elif isinstance(value, str) and value not in _TEXTS:
            raise InvalidRequest(f"graph: node {node} passes {value[:_LONGEST_TEXT]!r}, which custom losses may not")
        elif type(value) is int and abs(value) > _LARGEST_INTEGER:
            raise InvalidRequest(
                f"graph: node {node} has the number {str(value)[:20]}; {_LARGEST_INTEGER} is the largest"
            )


def _of_object(value: Mapping[str, Any], node: str, depth: int) -> Iterator[str]:
    """Iterate over the references of an object with one key, which says what it stands for."""
    if len(value) == 1:
        ((kind, held),) = value.items()
        if kind == "ref" and isinstance(held, str):
            yield held
            return
        if kind in ("tuple", "slice") and isinstance(held, list) and (kind == "tuple" or len(held) == 3):
            yield from _references(held, node, depth)
            return
        if kind == "dict" and isinstance(held, dict):
            yield from _references(list(held.values()), node, depth)
            return
        if kind == "ellipsis" and held is True:
            return
        if isinstance(held, str) and (
            (kind == "float" and held in _NON_FINITE) or (kind == "dtype" and held in _DTYPES)
        ):
            return
    raise InvalidRequest(f"graph: node {node} has the argument {str(value)[:_LONGEST_TEXT]}, which is not served")


def check_inputs(loss: CustomLoss, targets: np.ndarray, inputs: Mapping[str, np.ndarray], name: str) -> None:
    """Raise ``InvalidRequest`` unless the datum, called ``name``, has the loss's inputs in their ranks."""
    given = {**inputs, TARGETS: targets, LOGPROBS: targets}
    for key, rank in loss.inputs:
        if key not in given:
            raise InvalidRequest(f"{name}.loss_fn_inputs: custom loss {loss.name} reads {key}; send it")
        if given[key].ndim != rank:
            raise InvalidRequest(
                f"{name}.loss_fn_inputs: {key} has rank {given[key].ndim}, and custom loss {loss.name} takes rank {rank}"
            )


def number(text: str) -> float:
    """Return the number of an encoded ``float``."""
    return math.nan if text == "nan" else float(text)


def _mapping(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} must be an object")
    return value


def _listed(value: Any, field: str, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise InvalidRequest(f"{field} must be a list of at most {most}")
    return value


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise InvalidRequest(f"{field} must be a text of at most {_LONGEST_TEXT} characters")
    return value
