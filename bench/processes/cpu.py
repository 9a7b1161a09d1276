"""Processor time of processes, read from ``/proc``."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return processor seconds of all threads of a process so far; 0 for one that has ended."""
    found = _stat(pid)
    # utime and stime, counted after the name.
    return 0.0 if found is None else (int(found[11]) + int(found[12])) / _TICKS


def group_cpu_seconds(group: int) -> float:
    """Return processor seconds of all processes of a process group so far."""
    return sum(cpu_seconds(pid) for pid in _members(group))


def _members(group: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (found := _stat(pid)) is not None and int(found[2]) == group]


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the process's name, which itself may hold any character. None for a process that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None


def children_cpu_seconds(pid: int) -> float:
    """Return processor seconds of all living processes under a process so far."""
    with suppress(psutil.NoSuchProcess):
        return sum(cpu_seconds(child.pid) for child in psutil.Process(pid).children(recursive=True))
    return 0.0


def idle_seconds() -> float:
    """Return idle seconds of all the machine's cores since it started."""
    return float(psutil.cpu_times().idle)


def pin_group(group: int, cores: set[int]) -> None:
    """Keep every thread of every process of the group on ``cores``. Threads that start later inherit the cores."""
    for process in _members(group):
        pin(process, cores)


def pin(pid: int, cores: set[int]) -> None:
    """Keep every thread of the process on ``cores``."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
