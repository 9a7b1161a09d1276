"""A real SDK client in a process of its own that takes a step whenever a test asks for one."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.conftest import BASE_NAME
from tests.ui.sdk_steps import SAVE, STEP, serve

SECONDS = 120.0


class Stepping:
    """The client. ``run`` is its run's id, ``means`` are the mean losses of its steps."""

    def __init__(self, client: Connection) -> None:
        self._client = client
        self.run: str = self._hear()
        self.means: list[float] = []

    def step(self, count: int = 1) -> None:
        """Take steps, one after the other."""
        for _ in range(count):
            self.begin_step()
            self.end_step()

    def begin_step(self) -> None:
        """Have a step begin."""
        self._client.send(STEP)

    def end_step(self) -> None:
        """Wait for the step's end."""
        self.means.append(self._hear())

    def save(self) -> None:
        """Publish a version."""
        self._client.send(SAVE)
        self._hear()

    def _hear(self) -> Any:
        assert self._client.poll(SECONDS), "the client does not answer"
        return self._client.recv()


@contextmanager
def stepping(base_url: str, key: str) -> Iterator[Stepping]:
    """Start a client with a run of its own; its session ends with the block.

    Clients are forked from one process that has the SDK loaded, which takes longer than most tests.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([serve.__module__])
    here, there = processes.Pipe()
    process = processes.Process(target=serve, args=(there, base_url, key, BASE_NAME), daemon=True)
    process.start()
    there.close()
    try:
        yield Stepping(here)
    finally:
        process.kill()
        process.join()
        here.close()
