"""Micro-batches of a small base on a CPU: by threads, and once there is load by a process for each core.

Processes cost each the base once more and seconds to start, so they start beside the threads after a while of passes that
stand beside each other, and stay.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread

from engine.training.base import BaseModel
from engine.training.fused_micro_batch import Attempt, Clocks, FusedMicroBatches
from engine.training.micro_batch import Row
from engine.training.micro_batch_process import BaseOrder, MicroBatchProcess
from engine.training.micro_batch_threads import MicroBatchThreads

log = logging.getLogger(__name__)

MOST_PARAMETERS = 100_000_000
"""Of a base that is computed by processes. A larger one's operations are long: its threads hardly wait for the interpreter."""
_BUSY_PASSES = 48
"""Passes beside others until processes start."""


class MicroBatchProcesses:
    """A ``MicroBatchExecutor``. Close it."""

    def __init__(self, base: BaseModel, order: BaseOrder, *, busy_passes: int = _BUSY_PASSES) -> None:
        """``order`` makes ``base`` again; processes start after ``busy_passes`` passes beside others."""
        self._order = order
        self._threads = MicroBatchThreads(base.device)
        self._busy_passes = busy_passes
        self._at_once = 0
        self._lock = Lock()
        self._taking = Lock()
        self._free: SimpleQueue[MicroBatchProcess] = SimpleQueue()
        self._starting: Thread | None = None
        self._is_ready = Event()
        self._is_closed = False

    @property
    def slots(self) -> int:
        """One for each core."""
        return self._threads.slots

    @property
    def has_processes(self) -> bool:
        """Whether processes compute."""
        return self._is_ready.is_set()

    def wait_started(self, seconds: float) -> bool:
        """Whether processes compute within that time."""
        return self._is_ready.wait(seconds)

    def split(self, rows: Sequence[Row], *, token_budget: int, slots: int) -> list[list[Row]]:
        """See ``MicroBatchThreads``."""
        return self._threads.split(rows, token_budget=token_budget, slots=slots)

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[Row]], *, backward: bool, slots: int
    ) -> list[Attempt]:
        """What came of each of ``batches``, in their order."""
        with self._lock:
            self._at_once += 1
            self._count()
        try:
            if not batches or not self.has_processes:
                return self._threads.compute(micro_batches, batches, backward=backward, slots=slots)
            return self._by_processes(micro_batches, batches, backward=backward, slots=slots)
        finally:
            with self._lock:
                self._at_once -= 1

    def close(self) -> None:
        """End the processes; nothing may be under way."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.join()
        while not self._free.empty():
            self._free.get().close()

    def _count(self) -> None:
        if self._at_once > 1 and self._starting is None:
            self._busy_passes -= 1
            if self._busy_passes <= 0:
                self._starting = Thread(target=self._start, name="start micro-batch processes", daemon=True)
                self._starting.start()

    def _start(self) -> None:
        processes = [MicroBatchProcess(self._order) for _ in range(self.slots)]
        try:
            for process in processes:
                process.wait_ready()
        except (OSError, EOFError):
            log.exception("micro-batch processes of %s did not start; threads go on", self._order.facts.name)
            for process in processes:
                process.close()
            return
        for process in processes:
            self._free.put(process)
        self._is_ready.set()
        log.info("%d processes compute the micro-batches of %s", len(processes), self._order.facts.name)

    def _by_processes(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[Row]], *, backward: bool, slots: int
    ) -> list[Attempt]:
        taken = min(slots, len(batches))
        with self._taking:
            # All of them before anybody else takes one: nobody waits for one while holding another.
            processes = [self._free.get() for _ in range(taken)]
        threads = max(1, slots // taken)
        dealt = [list(batches[number::taken]) for number in range(taken)]
        sent = [
            _is_sent(partial(process.send, micro_batches, mine, backward=backward, threads=threads))
            for process, mine in zip(processes, dealt, strict=True)
        ]
        found: list[list[Attempt]] = []
        for process, mine, is_sent in zip(processes, dealt, sent, strict=True):
            attempts = _received(process) if is_sent else None
            if attempts is not None:
                self._free.put(process)
            else:
                process.close()
                attempts = self._by_another(micro_batches, mine, backward=backward, threads=threads)
            found.append(attempts)
        return [found[number % taken][number // taken] for number in range(len(batches))]

    def _by_another(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[Row]], *, backward: bool, threads: int
    ) -> list[Attempt]:
        """Once more, by a process in the place of one that ended; when that ends too, nothing comes of them."""
        log.error("a process that computes micro-batches of %s has ended; starting another", self._order.facts.name)
        process = self._started()
        process.send(micro_batches, batches, backward=backward, threads=threads)
        attempts = _received(process)
        if attempts is None:
            process.close()
            process, attempts = self._started(), [Attempt(None, Clocks()) for _ in batches]
        self._free.put(process)
        return attempts

    def _started(self) -> MicroBatchProcess:
        process = MicroBatchProcess(self._order)
        process.wait_ready()
        return process


def _is_sent(send: Callable[[], None]) -> bool:
    try:
        send()
    except OSError:
        return False
    return True


def _received(process: MicroBatchProcess) -> list[Attempt] | None:
    """None when the process has ended."""
    try:
        return process.receive()
    except (OSError, EOFError):
        return None
