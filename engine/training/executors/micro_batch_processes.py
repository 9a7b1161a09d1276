"""Micro-batches of a small base on a CPU: by threads, and once there is load by a process for each core.

Processes cost each the base once more and seconds to start, so they start beside the threads after a while of passes that
stand beside each other, and stay.
"""

import logging
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Event, Lock, Thread

from engine.model.base import BaseModel
from engine.training.executors.micro_batch_process import BaseOrder, MicroBatchProcess
from engine.training.executors.threads import MicroBatchThreads
from engine.training.fused_micro_batch import Clocks, FusedMicroBatches, MicroBatchResult
from engine.training.micro_batch import PackedRow

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
        self._free: SimpleQueue[MicroBatchProcess | None] = SimpleQueue()
        self._starting: Thread | None = None
        self._is_ready = Event()

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

    def split(self, rows: Sequence[PackedRow], *, token_budget: int, slots: int) -> list[list[PackedRow]]:
        """See ``MicroBatchThreads``."""
        return self._threads.split(rows, token_budget=token_budget, slots=slots)

    def compute(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
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
        if self._starting is not None:
            self._starting.join()
        while not self._free.empty():
            if (process := self._free.get()) is not None:
                process.close()

    def _count(self) -> None:
        if self._at_once > 1 and self._starting is None:
            self._busy_passes -= 1
            if self._busy_passes <= 0:
                self._starting = Thread(target=self._start, name="start micro-batch processes", daemon=True)
                self._starting.start()

    def _start(self) -> None:
        # All at once, then each waited for.
        processes = [self._ready(process) for process in [self._made() for _ in range(self.slots)]]
        if None in processes:
            log.error("micro-batch processes of %s did not start; threads go on", self._order.facts.name)
            for process in processes:
                if process is not None:
                    process.close()
            return
        for process in processes:
            self._free.put(process)
        self._is_ready.set()
        log.info("%d processes compute the micro-batches of %s", len(processes), self._order.facts.name)

    def _by_processes(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, slots: int
    ) -> list[MicroBatchResult]:
        taken = min(slots, len(batches))
        with self._taking:
            # All of them before anybody else takes one: nobody waits for one while holding another.
            processes = [self._free.get() for _ in range(taken)]
        threads = max(1, slots // taken)
        dealt = [list(batches[number::taken]) for number in range(taken)]
        sent = [
            _is_sent(process, micro_batches, mine, backward=backward, threads=threads)
            for process, mine in zip(processes, dealt, strict=True)
        ]
        found: list[list[MicroBatchResult]] = []
        for process, mine, is_sent in zip(processes, dealt, sent, strict=True):
            attempts = _received(process) if process is not None and is_sent else None
            if attempts is None:
                if process is not None:
                    process.close()
                process, attempts = self._by_another(micro_batches, mine, backward=backward, threads=threads)
            self._free.put(process)
            found.append(attempts)
        return [found[number % taken][number // taken] for number in range(len(batches))]

    def _by_another(
        self, micro_batches: FusedMicroBatches, batches: Sequence[list[PackedRow]], *, backward: bool, threads: int
    ) -> tuple[MicroBatchProcess | None, list[MicroBatchResult]]:
        """Once more, by a process in the place of one that ended; when that ends too, nothing comes of them.

        Where none can be started, threads compute, and the next pass tries again to start one.
        """
        name = self._order.facts.name
        log.error("a process that computes micro-batches of %s has ended; starting another", name)
        process = self._ready(self._made())
        if process is None:
            log.error("no process can be started for micro-batches of %s; threads compute them", name)
            return None, self._threads.compute(micro_batches, batches, backward=backward, slots=threads)
        if _is_sent(process, micro_batches, batches, backward=backward, threads=threads):
            attempts = _received(process)
            if attempts is not None:
                return process, attempts
        process.close()
        return None, [MicroBatchResult(None, Clocks()) for _ in batches]

    def _made(self) -> MicroBatchProcess | None:
        try:
            return MicroBatchProcess(self._order)
        except OSError:
            return None

    @staticmethod
    def _ready(process: MicroBatchProcess | None) -> MicroBatchProcess | None:
        if process is None or process.wait_ready():
            return process
        process.close()
        return None


def _is_sent(
    process: MicroBatchProcess | None,
    micro_batches: FusedMicroBatches,
    batches: Sequence[list[PackedRow]],
    *,
    backward: bool,
    threads: int,
) -> bool:
    """Whether there is a process that takes the work."""
    if process is None:
        return False
    try:
        process.send(micro_batches, batches, backward=backward, threads=threads)
    except OSError:
        return False
    return True


def _received(process: MicroBatchProcess) -> list[MicroBatchResult] | None:
    """None when the process has ended."""
    try:
        return process.receive()
    except (OSError, EOFError):
        return None
