"""Standard output of long-lived processes. A reader that is gone or a disk that is full must not end a service.

Lines go to the file descriptor at once: what Python buffers would fail again at each later line, and at the process's end.
"""

import logging
import os
import sys

log = logging.getLogger(__name__)


def say(text: str) -> None:
    """Print ``text``; when that fails, log why and go on."""
    try:
        _write(f"{text}\n".encode(errors="replace"))
    except OSError as failure:
        log.warning("standard output cannot be written: %s", failure.strerror)


class DroppedLines:
    """Printing of lines, of which those are dropped that cannot be written. Their number is told once a line can be."""

    def __init__(self) -> None:
        self._count = 0

    def print(self, line: str) -> None:
        """Print ``line``, or drop it."""
        told = f"\n{self._count} lines could not be printed\n" if self._count else ""
        try:
            _write(f"{told}{line}\n".encode(errors="replace"))
        except OSError as failure:
            if not self._count:
                log.warning("standard output cannot be written, lines are dropped: %s", failure.strerror)
            self._count += 1
        else:
            self._count = 0


def _write(data: bytes) -> None:
    """Write all of ``data``. Raises ``OSError``; a first part may be written then."""
    # None when the process was started without a standard output: its number may be another file's by now.
    if sys.stdout is None:
        return
    descriptor = sys.stdout.fileno()
    while data:
        data = data[os.write(descriptor, data) :]
