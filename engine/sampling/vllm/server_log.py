"""Files that hold the output of vLLM servers: each within a bound, and none kept for long after its last line.

A server writes a line for each adapter that it loads, so its tenants decide how much it says.
"""

import os
import shutil
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import time
from typing import BinaryIO

MOST_BYTES = 64 * 2**20
"""Bytes of a file from which it is moved aside, in place of the part that was moved before."""
KEPT = timedelta(days=365)
"""Time after its last line for which a server's output is kept."""
_ASIDE = ".1"


class ServerLog:
    """The output of one server, and of those that ran under its name before. Its methods block."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._begun = 0
        """Place at which this run's output begins."""

    def open(self) -> BinaryIO:
        """Open the file for a new run, whose output is appended. Remove the output of servers that are long gone."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._forget_old()
        file = self._path.open("ab")
        self._begun = file.tell()
        return file

    def end_of_run(self, size: int) -> str:
        """Return at most the last ``size`` bytes that this run has written."""
        return self._end(size, self._begun)

    def end(self, size: int) -> str:
        """Return the last ``size`` bytes of the file."""
        return self._end(size, 0)

    def bound(self) -> None:
        """Move the output aside once it is too large. The server goes on appending to the same file.

        Lines that are written meanwhile are lost: the file is the server's, which cannot be asked to open another.
        """
        if self._path.stat().st_size > self._most_bytes:
            shutil.copyfile(self._path, f"{self._path}{_ASIDE}")
            os.truncate(self._path, 0)
            self._begun = 0

    def _end(self, size: int, start: int) -> str:
        with self._path.open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - size))
            return log.read().decode(errors="replace")

    def _forget_old(self) -> None:
        oldest = time() - KEPT.total_seconds()
        for pattern in ("*.log", f"*.log{_ASIDE}"):
            for file in self._path.parent.glob(pattern):
                # Another server may begin, or remove it, at the same time.
                with suppress(FileNotFoundError):
                    if file.stat().st_mtime < oldest:
                        file.unlink()
