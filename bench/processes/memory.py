"""Memory of processes, read from ``/proc``."""

import os
from pathlib import Path

_MIB = 2**20


def rss_mib(pid: int | None = None) -> float:
    """Return the resident memory of a process now, this one by default, in MiB."""
    return _status("VmRSS", pid)


def peak_rss_mib(pid: int | None = None) -> float:
    """Return the most resident memory that a process has had, in MiB."""
    return _status("VmHWM", pid)


def available_mib() -> float:
    """Return the memory that the machine can still give without swapping, in MiB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / _MIB for line in lines if line.startswith("MemAvailable:"))


def _status(field: str, pid: int | None) -> float:
    lines = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / _MIB for line in lines if line.startswith(f"{field}:"))
