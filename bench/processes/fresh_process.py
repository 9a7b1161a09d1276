"""Runs a call in a process of its own, so that the memory and its peak are free of earlier measurements."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_PRELOADED = ["torch", "transformers", "peft", "engine.training.trainer"]
"""Modules imported once, by the server process that the fresh processes are forked from."""


def prepare() -> None:
    """Set the environment that every process of a benchmark inherits. Call this first."""
    # As ``weft serve`` sets it.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)


def in_fresh_process(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call(...)`` in a process that ends afterwards. Return its result, or raise its error."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(call, *args, **kwargs).result()
