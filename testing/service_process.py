"""The service as a child process on a free loopback port, for demos, benchmarks and end-to-end tests."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 600.0
STOP_SECONDS = 75.0
"""Longest wait for the service's end; ``weft up`` gives its children less."""
_URL_LINE = "export TINKER_BASE_URL="
_KEY_LINE = "export TINKER_API_KEY="
_READY_LINE = "ready;"


class ServiceProcess:
    """A ``weft serve`` or ``weft up`` that starts on entering a ``with`` block and ends, by SIGINT, on leaving it.

    ``environment`` is the process's. ``base_url`` is set once started. ``first_key`` is the key printed at a data
    folder's very first start, else None.
    """

    def __init__(
        self,
        *,
        data: Path,
        base_models: Sequence[str],
        port: int = 0,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = ("serve",),
    ) -> None:
        """Run ``command``, a ``weft`` command with options that prints its address. Port 0 means a free port."""
        self._command = [sys.executable, "-m", "cli.main", *command, "--port", str(port)]
        self._command += ["--data", str(data)]
        for spec in base_models:
            self._command += ["--base-model", spec]
        self.environment = {**os.environ, **(environment or {})}
        self._log_path = data.parent / f"{data.name}.log"
        self._printed_path = data.parent / f"{data.name}.out"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.base_url = ""
        self.first_key: str | None = None

    @property
    def pid(self) -> int:
        """Process id of the running service. Raises ``RuntimeError`` before ``start``."""
        return self._running().pid

    def start(self) -> None:
        """Start and wait until the service is ready. Raises ``RuntimeError`` with the end of its log when it does not come up."""
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
            )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._pump, args=(self._process, lines, self._printed_path), daemon=True)
        self._reader.start()
        self.base_url = ""
        while True:
            try:
                line = lines.get(timeout=START_SECONDS)
            except queue.Empty:
                self.kill()
                raise RuntimeError(
                    f"weft serve printed no address in {START_SECONDS:.0f} s\n{self.log_tail()}"
                ) from None
            if line is None:
                raise RuntimeError(f"weft serve ended before it listened\n{self.log_tail()}")
            if line.startswith(_URL_LINE):
                self.base_url = line.removeprefix(_URL_LINE).strip()
            elif line.startswith(_KEY_LINE):
                self.first_key = line.partition("=")[2].strip()
            elif line.startswith(_READY_LINE):
                return

    @staticmethod
    def _pump(process: subprocess.Popen[str], lines: "queue.SimpleQueue[str | None]", printed_path: Path) -> None:
        is_starting = True
        if process.stdout is not None:
            with process.stdout, printed_path.open("a") as printed:
                for line in process.stdout:
                    printed.write(line)
                    printed.flush()
                    if is_starting:
                        lines.put(line)
                    is_starting = is_starting and not line.startswith(_READY_LINE)
        lines.put(None)

    def stop(self) -> int:
        """End the service in order (SIGINT), wait for it, and return the exit status."""
        process = self._running()
        process.send_signal(signal.SIGINT)
        return self._ended(process)

    def kill(self) -> None:
        """Kill the service (SIGKILL) and wait until it has ended."""
        process = self._running()
        process.kill()
        self._ended(process)

    def _ended(self, process: subprocess.Popen[str]) -> int:
        status = process.wait(timeout=STOP_SECONDS)
        if self._reader is not None:
            self._reader.join(timeout=STOP_SECONDS)
        return status

    def log_tail(self, characters: int = 4000) -> str:
        """Return the last characters that the service wrote to standard error."""
        return self._log_path.read_text()[-characters:] if self._log_path.exists() else ""

    def printed_tail(self, characters: int = 4000) -> str:
        """Return the last characters that the service wrote to standard output."""
        return self._printed_path.read_text()[-characters:] if self._printed_path.exists() else ""

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the service was not started")
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running().poll() is None:
            self.stop()
