"""Runs custom losses: a checked graph of operators (``contracts.custom_loss``), for each datum, with its gradient.

A graph runs on detached log-probabilities, on the CPU, away from the passes. The gradient with respect to them becomes the
weights of an ordinary linear loss: ``sum(g * logp)`` has the same gradient in the adapter as the loss itself (chain rule).

Each evaluation runs on one thread: sums over several would depend on their number, and a replay must give the same bits.

The work is bounded before it is done: by the elements of each result, as ``Cost`` tells them, and by a price for each
operator. The bound is no clock: a replay on a busier machine must do exactly what was done before.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from contracts.custom_loss import (
    ATTRIBUTES,
    FUNCTIONS,
    METHODS,
    TARGETS,
    Cost,
    CustomLoss,
    Node,
    number,
    outputs,
)
from contracts.errors import InvalidRequest
from contracts.operations import Datum

MOST_ELEMENTS = 2**22
"""Most elements of one result: all pairs of 2,048 tokens."""
MOST_DATUM_ELEMENTS = 2**25
"""Most elements of all results of one datum, which autograd keeps in memory: 128 MiB."""
MOST_WORK = 2**29
"""Most work of an operation, in elements. 131,072 operators on short sequences: seconds."""
OPERATOR_WORK = 4096
"""Work of calling an operator, in elements."""
_LARGEST_INTEGER = 2**62
_INTEGER_DIVISIONS = frozenset({"remainder", "fmod", "floordiv", "mod"})
"""Operators that divide tensors of integers as the processor does, as ``div`` does with a ``rounding_mode``."""
_NO_MEMORY = re.compile(r"DefaultCPUAllocator|not enough memory|can't allocate memory|bad_alloc", re.IGNORECASE)
"""Messages of torch's allocator, which raises ``RuntimeError`` as any operator does."""
_SCALARS = (bool, int, float)


@dataclass(slots=True)
class Evaluated:
    """Value of a custom loss on a batch: the sum, the metrics, and for each datum d loss / d logprobs in their shape."""

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    slopes: list[np.ndarray] = field(default_factory=list)


def evaluate(
    loss: CustomLoss, data: Sequence[Datum], logprobs: Sequence[np.ndarray], meter: "LossMeter | None" = None
) -> Evaluated:
    """Run the loss on each datum with its ``logprobs``, float32 of the targets' shape. Blocking.

    ``meter`` tells the work so far, of an evaluation that fails too.

    Raises ``InvalidRequest`` naming the operator that fails, and for a loss that takes too much work, is no finite scalar, or
    has a gradient that is not finite; ``MemoryError`` when the machine has no memory left, which is no fault of the loss.
    Metrics named ``:mean`` are means over the data, the others sums.
    """
    with _one_thread(), torch.enable_grad():
        return _evaluated(loss, data, logprobs, meter or LossMeter())


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        # torch keeps a number for each thread, but the last one set is the default of new threads.
        torch.set_num_threads(before)


def _evaluated(
    loss: CustomLoss, data: Sequence[Datum], logprobs: Sequence[np.ndarray], meter: "LossMeter"
) -> Evaluated:
    found = Evaluated()
    for datum, logp in zip(data, logprobs, strict=True):
        meter.begin_datum()
        leaf = torch.from_numpy(logp.astype(np.float32)).requires_grad_()
        value, metrics = _run(loss, datum, leaf, meter)
        with _refusing(f"custom loss {loss.name}: its gradient failed"):
            (slope,) = torch.autograd.grad(value, leaf, allow_unused=True) if value.requires_grad else (None,)
        slope = torch.zeros_like(leaf) if slope is None else slope
        if not (math.isfinite(float(value.detach())) and bool(slope.isfinite().all())):
            raise InvalidRequest(f"custom loss {loss.name}: the loss or its gradient is not finite")
        found.loss += float(value.detach())
        found.slopes.append(slope.numpy())
        for name, one in metrics.items():
            share = len(data) if name.endswith(":mean") else 1
            found.metrics[name] = found.metrics.get(name, 0.0) + one / share
    return found


@contextmanager
def _refusing(failed: str) -> Iterator[None]:
    """Raise ``InvalidRequest`` for an error of an operator, and ``MemoryError`` for one of the allocator."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
        if _NO_MEMORY.search(str(error)):
            raise MemoryError("no memory is left for a custom loss") from error
        told = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise InvalidRequest(f"{failed}: {told}") from error


def _run(loss: CustomLoss, datum: Datum, logp: Tensor, meter: "LossMeter") -> tuple[Tensor, dict[str, float]]:
    """Run the graph and return the loss, a scalar with its history, and the metrics."""
    given = {**datum.inputs, TARGETS: datum.targets}
    values: dict[str, Any] = {}
    for node, (name, _) in zip(loss.nodes, loss.inputs, strict=False):
        values[node.name] = logp if not values else torch.from_numpy(given[name].copy())
    for node in loss.nodes[len(loss.inputs) : -1]:
        with _refusing(f"custom loss {loss.name}: {node.target} (node {node.name}) failed"):
            values[node.name] = _computed(node, values, meter)
    result, named = outputs(loss.nodes[-1])
    value = values[result]
    if not isinstance(value, Tensor) or value.ndim or not value.dtype.is_floating_point:
        raise InvalidRequest(f"custom loss {loss.name}: its loss must be a scalar tensor of floats")
    return value, {name: _scalar(loss, name, values[of]) for name, of in named.items()}


def _scalar(loss: CustomLoss, name: str, value: Any) -> float:
    if not isinstance(value, (Tensor, *_SCALARS)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise InvalidRequest(f"custom loss {loss.name}: metric {name} must be a scalar")
    return float(value.detach() if isinstance(value, Tensor) else value)


def _computed(node: Node, values: Mapping[str, Any], meter: "LossMeter") -> Any:
    """Compute one operator, once the meter has admitted its result."""
    args = [_decoded(arg, values) for arg in node.args]
    kwargs = {name: _decoded(arg, values) for name, arg in node.kwargs.items()}
    if node.op == "call_method":
        cost, call = METHODS[node.target], _METHODS[node.target]
        if not args or not isinstance(args[0], Tensor):
            raise TypeError("a method is called on a tensor only")
    else:
        cost, call = FUNCTIONS[node.target], _FUNCTIONS[node.target]
    meter.admit(_elements(cost, args, kwargs))
    _check_division(node.target.rpartition(".")[2], [*args, *kwargs.values()])
    result = call(*args, **kwargs)
    if isinstance(result, int) and abs(result) > _LARGEST_INTEGER:
        raise OverflowError("the number is too large")
    return result


def _check_division(operation: str, operands: Sequence[Any]) -> None:
    """Raise ``TypeError`` for a division of integer tensors: the least integer by -1 ends the process (SIGFPE)."""
    rounds = operation in ("div", "divide", "true_divide") and any(isinstance(one, str) for one in operands)
    if not rounds and operation not in _INTEGER_DIVISIONS:
        return
    has_floats = any(
        isinstance(one, float) or (isinstance(one, Tensor) and one.is_floating_point()) for one in operands
    )
    if not has_floats and any(isinstance(one, Tensor) for one in operands):
        raise TypeError("tensors of integers are not divided here: make one of them float() first")


class LossMeter:
    """Work of one operation so far, in elements. An operator that is refused counts as a call and is not computed."""

    def __init__(self) -> None:
        self.work = self._datum = 0

    def begin_datum(self) -> None:
        """Count the elements of a new datum."""
        self._datum = 0

    def admit(self, elements: int) -> None:
        """Count an operator of at most ``elements`` elements. Raises ``InvalidRequest`` beyond a limit."""
        self.work += OPERATOR_WORK
        if elements > MOST_ELEMENTS:
            raise InvalidRequest(f"custom loss: a result may have {elements} elements, and {MOST_ELEMENTS} is the most")
        if self._datum + elements > MOST_DATUM_ELEMENTS:
            raise InvalidRequest(
                f"custom loss: the results for one datum have over {MOST_DATUM_ELEMENTS} elements; shorten the datum or the graph"
            )
        if self.work + elements > MOST_WORK:
            raise InvalidRequest(
                "custom loss: it takes too much work for one request; send fewer data in one, or a smaller graph"
            )
        self.work += elements
        self._datum += elements


def _elements(cost: Cost, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return a bound of the elements that an operator computes."""
    tensors = list(_tensors([*args, *kwargs.values()]))
    given = sum(tensor.numel() for tensor in tensors)
    numbers = [one for one in _flat([*args[1:], *kwargs.values()]) if type(one) is int]
    first = tensors[0].numel() if tensors else 1
    match cost:
        case Cost.BROADCAST:
            return max(given, math.prod(_broadcast([tensor.shape for tensor in tensors])))
        case Cost.SHRINK:
            return given
        case Cost.PRODUCT:
            return math.prod(tensor.numel() for tensor in tensors[:2])
        case Cost.INDEX:
            return max(given, _picked(args[1]) * (first if tensors[:1] and tensors[0].dim() > 1 else 1))
    # The sizes of what follows are numbers. torch would take them from tensors, too, whose values nobody has looked at.
    if len(tensors) > (cost is not Cost.RANGE):
        raise TypeError("sizes must be numbers")
    if cost is Cost.RANGE:
        if any(isinstance(one, float) for one in _flat([*args, *kwargs.values()])):
            raise TypeError("a range is of integers")
        return sum(abs(one) for one in _flat([*args, *kwargs.values()]) if isinstance(one, int))
    if cost is Cost.EXPAND:
        return max(first, math.prod(_expanded(tensors[0].shape, numbers)))
    return given * math.prod(max(1, abs(one)) for one in numbers)


def _picked(index: Any) -> int:
    """Return the most times that an index picks each element: once by a slice or a mask, by a list as often as it is long."""
    times = 1
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list):
            times *= max(1, len(list(_flat(part))))
        elif isinstance(part, Tensor) and part.dtype is not torch.bool:
            times *= max(1, part.numel())
    return times


def _expanded(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """Iterate over the dimensions of ``shape`` expanded to ``sizes``, where -1 keeps a dimension."""
    for place, size in enumerate(sizes, start=len(shape) - len(sizes)):
        yield size if size >= 0 else shape[place] if place >= 0 else 1


def _broadcast(shapes: Sequence[Sequence[int]]) -> Iterator[int]:
    """Iterate over the dimensions of the shapes' broadcast, the last first; shapes that do not fit give the larger."""
    for place in range(max(map(len, shapes), default=0)):
        yield max(shape[-1 - place] for shape in shapes if len(shape) > place)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (value for value in _flat(values) if isinstance(value, Tensor))


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _decoded(value: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument of the SDK's encoding, in which each object has one key."""
    if isinstance(value, list):
        return [_decoded(one, values) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "ref":
            return values[held]
        case "tuple":
            return tuple(_decoded(one, values) for one in held)
        case "slice":
            return slice(*(_decoded(one, values) for one in held))
        case "float":
            return number(held)
        case "dtype":
            return getattr(torch, held)
        case "ellipsis":
            return ...
    raise TypeError(f"{kind} is no argument here")


def _on_numbers(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of Python's for tensors and numbers only: it would multiply tuples, too."""

    def checked(*operands: Any) -> Any:
        if not all(isinstance(operand, (Tensor, *_SCALARS)) for operand in operands):
            raise TypeError("the operands must be tensors or numbers")
        if call is operator.pow and not any(isinstance(operand, Tensor) for operand in operands):
            return math.pow(*operands)
        return call(*operands)

    return checked


def _item(held: Any, index: Any) -> Any:
    if not isinstance(held, Tensor | tuple):
        raise TypeError("only a tensor or a tuple has items")
    return held[index]


def _attribute(held: Any, name: str) -> Any:
    if name not in ATTRIBUTES or not isinstance(held, Tensor | tuple):
        raise TypeError("only a tensor has attributes")
    return getattr(held, name)


def _converted(tensor: Tensor, kind: Any = None, *, dtype: Any = None) -> Tensor:
    wanted = kind if dtype is None else dtype
    if isinstance(wanted, Tensor):
        wanted = wanted.dtype
    if not isinstance(wanted, torch.dtype):
        raise TypeError("a tensor is converted to a dtype only")
    return tensor.to(wanted)


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a name of ``FUNCTIONS``."""
    module, _, last = name.rpartition(".")
    if module == "operator":
        return _item if last == "getitem" else _on_numbers(getattr(operator, last))
    if module == "math":
        found: Callable[..., Any] = getattr(math, last)
        return found
    if name == "getattr":
        return _attribute
    home: Any = functional if module == "torch.nn.functional" else torch
    return cast("Callable[..., Any]", getattr(home, last.replace("log_sigmoid", "logsigmoid")))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({name: _function(name) for name in FUNCTIONS})
_METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: _converted if name == "to" else getattr(Tensor, name) for name in METHODS}
)
