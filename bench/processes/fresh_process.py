"""Calls in processes of their own: nothing of an earlier measurement is in memory, and its peak is its own."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_PRELOADED = ["torch", "transformers", "peft", "engine.training.trainer"]
"""Modules imported once; processes are forked from there before anything has computed."""


def prepare() -> None:
    """Set what every process of a benchmark inherits. Call first."""
    # As ``weft serve`` sets it.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def in_fresh_process(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``call(...)`` in a process that ends with it; raises what it raises."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(call, *args, **kwargs).result()
