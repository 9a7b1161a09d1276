"""Files of the security log: JSON lines in the data folder, a file for each host and month.

An operator's command runs in a process of its own, whose standard error nobody collects; its records are found here.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from queue import SimpleQueue

from telemetry.logs import JsonFormatter
from telemetry.security import LOGGER

SECURITY_FOLDER = "logs/security"
"""Folder of the files, relative to the data folder."""
MONTHS_KEPT = 13
"""Files of a host that stay: a year, and the month that is being written."""


class MonthlyFiles(logging.Handler):
    """Appends each record as a line to the file of this host and month, and removes this host's oldest files."""

    def __init__(self, folder: Path, process: str, host: str) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter(process))
        self._folder = folder
        self._prefix = "security-" + re.sub("[^A-Za-z0-9_.-]", "-", host)[:100]
        self._month = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record. A file that cannot be written is an error of logging, never of what is logged."""
        try:
            month = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m")
            if month != self._month:
                self._begin_month(month)
            # Opened anew for each record: they are few, and an operator may move the file away.
            line = f"{self.format(record)}\n".encode()
            descriptor = os.open(self._path(month), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # One call: lines of several processes do not mix.
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:
            self.handleError(record)

    def _begin_month(self, month: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in sorted(self._folder.glob(f"{self._prefix}-????-??.jsonl"))[: -(MONTHS_KEPT - 1)]:
            if old != self._path(month):
                old.unlink(missing_ok=True)
        self._month = month

    def _path(self, month: str) -> Path:
        return self._folder / f"{self._prefix}-{month}.jsonl"


@contextmanager
def security_files(data_dir: Path, process: str, host: str) -> Iterator[None]:
    """Append this process's security events to files in the data folder while the block runs.

    A thread writes them: a slow disk must not hold up who notes an event.
    """
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handler = QueueHandler(records)
    listener = QueueListener(records, MonthlyFiles(data_dir / SECURITY_FOLDER, process, host))
    security = logging.getLogger(LOGGER)
    security.setLevel(logging.INFO)
    security.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        security.removeHandler(handler)
        listener.stop()
