"""A real SDK client in a process of its own that takes a step whenever a test asks for one."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.conftest import ROOT
from tests.e2e.conftest import BASE_NAME

SECONDS = 120.0


class Stepping:
    """The client. ``run`` is its run's id, ``means`` are the mean losses of its steps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._pump, daemon=True).start()
        self.run: str = self._hear()["run"]
        self.means: list[float] = []

    def step(self, count: int = 1) -> None:
        """Take steps, one after the other."""
        for _ in range(count):
            self.begin_step()
            self.end_step()

    def begin_step(self) -> None:
        """Have a step begin."""
        self._say("step")

    def end_step(self) -> None:
        """Wait for the step's end."""
        self.means.append(self._hear()["mean"])

    def save(self) -> None:
        """Publish a version."""
        self._say("save")
        self._hear()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        line = self._lines.get(timeout=SECONDS)
        assert line, "the client ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _pump(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextmanager
def stepping(base_url: str, key: str) -> Iterator[Stepping]:
    """Start a client with a run of its own; its session ends with the block."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.ui.sdk_steps", base_url, key, BASE_NAME]
    environment = {**os.environ, "TINKER_TELEMETRY": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT) as process:
        try:
            yield Stepping(process)
        finally:
            process.kill()
