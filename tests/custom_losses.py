"""Graphs of custom losses made by hand, as a client that is no SDK would send them."""

from collections.abc import Mapping
from typing import Any

LOGP = {"ref": "logprobs"}
INPUTS = [{"name": "logprobs", "rank": 1}]


def nodes(*middle: Mapping[str, Any], result: str = "loss") -> dict[str, Any]:
    """A graph of these nodes between ``logprobs`` and an output."""
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
    last = {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": result}, {"dict": {}}]}]}
    return {"format": 1, "nodes": [first, *middle, last]}


def call(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    """A node that calls ``target``."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}
