"""Memory and processor time of the service's processes while the benchmark runs."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.processes.cpu import cpu_seconds
from bench.processes.memory import rss_mib

_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    """Resident memory of the service's processes, in MiB by name, and their processor seconds so far."""

    at: float
    rss_of: Mapping[str, float]
    cpu_s: float

    @property
    def rss_mib(self) -> float:
        """Memory of all processes together."""
        return sum(self.rss_of.values())


class Meter:
    """Reads a process and all its children four times a second, in a thread. Use as a context manager."""

    def __init__(self, pid: int) -> None:
        self.readings: list[Reading] = []
        self._service = psutil.Process(pid)
        self._ending = threading.Event()
        self._names: dict[int, str] = {}
        self._thread = threading.Thread(target=self._read_on, daemon=True)

    def within(self, begin: float, end: float) -> list[Reading]:
        """Return the readings between two times of ``time.monotonic``."""
        return [one for one in self.readings if begin <= one.at < end]

    def _read_on(self) -> None:
        while not self._ending.wait(_SECONDS):
            with suppress(psutil.NoSuchProcess):
                processes = [self._service, *self._service.children(recursive=True)]
                cpu_s = sum(cpu_seconds(one.pid) for one in processes)
                self.readings.append(Reading(time.monotonic(), self._memory(processes), cpu_s))

    def _memory(self, processes: Iterable[psutil.Process]) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in processes:
            # A process may end meanwhile.
            with suppress(OSError, StopIteration, psutil.NoSuchProcess):
                if one.pid not in self._names:
                    self._names[one.pid] = f"{_kind(one.cmdline())} {one.pid}"
                found[self._names[one.pid]] = rss_mib(one.pid)
        return found

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()


def _kind(words: Sequence[str]) -> str:
    """Return the command of one of weft's processes, or the program's name of another."""
    return words[words.index("cli.main") + 1] if "cli.main" in words else Path(words[0] if words else "?").name
