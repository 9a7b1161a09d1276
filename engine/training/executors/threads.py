"""Micro-batches beside each other, each on its share of the cores.

Two halves of a batch on a thread each beat the whole batch on two threads: products this small end at a barrier every few
microseconds, and one of two threads that must wait for a core makes the other one wait too (``bench.contention``).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from engine.training.fused_micro_batch import FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow, split_for


class MicroBatchThreads:
    """Cuts rows for as many micro-batches at once as there are cores, and computes them. An accelerator takes one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._executor = ThreadPoolExecutor(self._cores, thread_name_prefix="micro-batch") if self._cores > 1 else None

    @property
    def slots(self) -> int:
        """One for each core."""
        return self._cores

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:
        """Micro-batches for so many cores at once: see ``split_for``."""
        return split_for(rows, at_once=slots, token_budget=max(1, token_budget * slots // self._cores))

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
        """What came of each of ``batches``, in their order."""
        attempt = partial(micro_batches.attempt, backward=backward)
        if self._executor is None or len(batches) < 2 or slots < 2:
            return [_on_threads(slots, attempt, batch) for batch in batches]
        threads = max(1, slots // len(batches))
        found = list(self._executor.map(partial(_on_threads, threads, attempt), batches))
        # torch keeps the number for each thread; what was set last is also the default of threads yet to come.
        torch.set_num_threads(self._cores)
        return found


def _on_threads(
    threads: int, attempt: Callable[[list[PackedRow]], MicroBatchResult], batch: list[PackedRow]
) -> MicroBatchResult:
    # Each time: MKL has one number for the whole process, which whoever computed last has set.
    torch.set_num_threads(threads)
    return attempt(batch)
