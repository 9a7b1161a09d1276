"""Handle on a process of SDK clients (``bench.clients.sdk_worker``), whose many tenants train on a service."""

import json
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bench.workload import OperationShape

_END_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of a client process on one run.

    ``wall_s`` and ``cpu_s`` (the whole process) in seconds; ``steps`` of each tenant as (begin, end) in seconds of the
    system's monotonic clock.
    """

    tokens_per_step: int
    wall_s: float
    cpu_s: float
    steps: list[list[tuple[float, float]]]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, the sum of all tenants, over the whole run."""
        return self.tokens_per_step * sum(len(steps) for steps in self.steps) / self.wall_s


class SdkClients:
    """Tenants on the real SDK, all in one process of their own. Use as a context manager.

    Raises ``RuntimeError`` when the process ends early. The process writes its errors to standard error.
    """

    def __init__(self, *, base_url: str, keys: list[str], base_model: str) -> None:
        self._open = {"do": "open", "base_url": base_url, "keys": keys, "base_model": base_model}
        self._process: subprocess.Popen[str] | None = None
        self._tokens_per_step = 0

    @property
    def pid(self) -> int:
        """Id of the client process."""
        return self._running().pid

    def start_run(
        self,
        shape: OperationShape,
        *,
        vocabulary: int,
        in_flight: int,
        steps: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Let every tenant train: ``steps`` each, or as many as begin within ``seconds``."""
        self._tokens_per_step = shape.tokens
        command = {"do": "run", "sequences": shape.sequences, "length": shape.length, "vocabulary": vocabulary}
        self._say({**command, "in_flight": in_flight, "steps": steps, "seconds": seconds})

    def finish_run(self) -> LoadReport:
        """Wait for the end of the run that ``start_run`` began, and return its report."""
        heard = self._hear()
        steps = [[(begin, end) for begin, end in steps] for steps in heard["steps"]]
        return LoadReport(self._tokens_per_step, heard["wall_s"], heard["cpu_s"], steps)

    def _say(self, command: dict[str, Any]) -> None:
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process ended with status {process.wait(timeout=_END_SECONDS)}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the client process was not started")
        return self._process

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.clients.sdk_worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(self._open)
        self._hear()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running()
        if error is None:
            self._say({"do": "close"})
            self._hear()
        else:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait(timeout=_END_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
