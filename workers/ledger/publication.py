"""Getting a version onto replicas before live samplers follow it, in a process that has both.

Where nobody is registered for a base model, its replicas load the version with the first sample of it.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.contracts.ids import CheckpointId, RunId

Prepare = Callable[[RunId, CheckpointId, Path], Awaitable[None]]
"""Loads a version of a run, in its folder, where samples of that run are made. Raises ``WeftError``: nothing is loaded."""


class Publication:
    """Who prepares versions, by base model."""

    def __init__(self) -> None:
        self._prepare: dict[str, Prepare] = {}

    def register(self, base_model: str, prepare: Prepare) -> None:
        """Have ``prepare`` called before a version of a run of ``base_model`` becomes the one that is followed."""
        self._prepare[base_model] = prepare

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId, directory: Path) -> None:
        """Make ready for ``version``; live samplers may follow it then. Raises ``WeftError``: they must not."""
        found = self._prepare.get(base_model)
        if found is not None:
            await found(run, version, directory)
