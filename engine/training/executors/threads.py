"""Computes micro-batches on threads of this process, one thread for each, each on a part of the cores.

Two halves of a batch, on one thread each, are faster than the whole batch on two threads. Small matrix products wait at a
barrier every few microseconds, so one thread that loses its core for a moment makes the other one wait too
(``bench.contention``). A micro-batch alone therefore leaves one core to the rest of the service.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from engine.training.fused_micro_batch import FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow, split_for


class MicroBatchThreads:
    """Cuts rows into micro-batches, one for each core at a time, and computes them. An accelerator computes one at a time.

    For any thread, several at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._executor = ThreadPoolExecutor(self._cores, thread_name_prefix="micro-batch") if self._cores > 1 else None

    @property
    def slots(self) -> int:
        """One slot for each core."""
        return self._cores

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:
        """Cut ``rows`` into micro-batches for ``slots`` cores at once (``split_for``)."""
        return split_for(rows, at_once=slots, token_budget=max(1, token_budget * slots // self._cores))

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
        """Compute ``batches`` on ``slots`` cores and return their results in order."""
        compute = partial(micro_batches.compute, backward=backward)
        if self._executor is None:
            return [compute(batch) for batch in batches]
        try:
            if len(batches) < 2 or slots < 2:
                threads = max(1, min(slots, self._cores - 1))
                return [_on_threads(threads, compute, batch) for batch in batches]
            threads = max(1, slots // len(batches))
            return list(self._executor.map(partial(_on_threads, threads, compute), batches))
        finally:
            # torch keeps a number of threads for each thread, and the last number set is the default of new threads.
            torch.set_num_threads(self._cores)


def _on_threads(
    threads: int, compute: Callable[[list[PackedRow]], MicroBatchResult], batch: list[PackedRow]
) -> MicroBatchResult:
    # Set each time: MKL has one number for the whole process, and another pass may have set it last.
    torch.set_num_threads(threads)
    return compute(batch)
