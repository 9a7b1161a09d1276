"""A benchmark's helper process: reads one JSON object and writes one. Its work is scheduled apart from other processes'."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonProcess:
    """Process ``python -m module TASK ANSWER``, which reads the file TASK and writes ANSWER. Use as a context manager."""

    def __init__(self, module: str, task: dict[str, Any]) -> None:
        self._module = module
        self._task = task
        self._folder = tempfile.TemporaryDirectory(prefix="weft-bench-")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._running().pid

    def result(self) -> dict[str, Any]:
        """Wait for the process's end and return its answer. Raises ``RuntimeError`` when there is none."""
        status = self._running().wait()
        if status != 0:
            raise RuntimeError(f"{self._module} ended with status {status}")
        found: dict[str, Any] = json.loads((Path(self._folder.name) / "answer").read_bytes())
        return found

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the process was not started")
        return self._process

    def __enter__(self) -> Self:
        task, answer = (Path(self._folder.name) / name for name in ("task", "answer"))
        task.write_text(json.dumps(self._task))
        self._process = subprocess.Popen([sys.executable, "-m", self._module, str(task), str(answer)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running()
        if error is not None:
            process.kill()
        process.wait()
        self._folder.cleanup()


def given_task() -> dict[str, Any]:
    """Read the task that this process was given."""
    found: dict[str, Any] = json.loads(Path(sys.argv[1]).read_bytes())
    return found


def give_answer(answer: dict[str, Any]) -> None:
    """Write this process's answer."""
    Path(sys.argv[2]).write_text(json.dumps(answer))
