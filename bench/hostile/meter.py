"""Memory and processor time of the service's processes while the benchmark runs."""

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

from bench.processes.cpu import cpu_seconds
from bench.processes.memory import rss_mib

_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """Resident memory of all the service's processes together, in MiB, and their processor seconds so far."""

    at: float
    rss_mib: float
    cpu_s: float


class Meter:
    """Reads a process and all its children four times a second, in a thread. Use as a context manager."""

    def __init__(self, pid: int) -> None:
        self.readings: list[Reading] = []
        self._service = psutil.Process(pid)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def within(self, begin: float, end: float) -> list[Reading]:
        """Return the readings between two times of ``time.monotonic``."""
        return [one for one in self.readings if begin <= one.at < end]

    def _read_on(self) -> None:
        while not self._ending.wait(_SECONDS):
            with suppress(psutil.NoSuchProcess):
                pids = [self._service.pid, *(child.pid for child in self._service.children(recursive=True))]
                self.readings.append(Reading(time.monotonic(), _memory(pids), sum(map(cpu_seconds, pids))))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()


def _memory(pids: Iterable[int]) -> float:
    found = 0.0
    for pid in pids:
        # A process may end meanwhile.
        with suppress(OSError, StopIteration):
            found += rss_mib(pid)
    return found
