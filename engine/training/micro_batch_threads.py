"""Micro-batches beside each other, each on its share of the cores.

Two halves of a batch on a thread each beat the whole batch on two threads: products this small end at a barrier every few
microseconds, and one of two threads that must wait for a core makes the other one wait too (``bench.contention``).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from engine.training.micro_batch import Row, padded_tokens, split_rows

LEAST_POSITIONS = 256
"""A smaller micro-batch costs more than a thread of its own gains."""

T = TypeVar("T")


class MicroBatchThreads:
    """Cuts rows for as many micro-batches at once as there are cores, and computes them. An accelerator takes one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._executor = ThreadPoolExecutor(self._cores, thread_name_prefix="micro-batch") if self._cores > 1 else None

    def split(self, rows: Sequence[Row], *, token_budget: int) -> list[list[Row]]:
        """Micro-batches, the largest first, of at most ``token_budget`` padded tokens in all those computed at once.

        Where the cores share the budget out to less than ``LEAST_POSITIONS`` each, of that many; one row may be longer.
        """
        each = max(token_budget // self._cores, min(token_budget, LEAST_POSITIONS))
        batches = split_rows(rows, token_budget=each)
        while len(batches) % self._cores:
            largest = max(batches, key=padded_tokens)
            if len(largest) < 2 or padded_tokens(largest) < 2 * LEAST_POSITIONS:
                break
            place, half = batches.index(largest), len(largest) // 2
            batches[place : place + 1] = [largest[half:], largest[:half]]
        return sorted(batches, key=padded_tokens, reverse=True)

    def map(self, compute: Callable[[list[Row]], T], batches: Sequence[list[Row]]) -> list[T]:
        """``compute`` of every batch, in their order. Raises what the first of them raises that does."""
        if self._executor is None or len(batches) < 2:
            return [_on_threads(self._cores, compute, batch) for batch in batches]
        threads = max(1, self._cores // len(batches))
        found = list(self._executor.map(partial(_on_threads, threads, compute), batches))
        # torch keeps the number for each thread; what was set last is also the default of threads yet to come.
        torch.set_num_threads(self._cores)
        return found


def _on_threads(threads: int, compute: Callable[[list[Row]], T], batch: list[Row]) -> T:
    # Each time: MKL has one number for the whole process, which whoever computed last has set.
    torch.set_num_threads(threads)
    return compute(batch)
