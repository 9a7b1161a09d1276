"""Getting versions onto replicas before live samplers follow them, and off before their folders go.

For a process that has both. Where nobody is registered for a base model, its replicas load a version with the first
sample of it.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.contracts.ids import CheckpointId, RunId

Prepare = Callable[[RunId, CheckpointId, Path], Awaitable[None]]
"""Loads a version of a run, in its folder, where samples of that run are made. Raises ``WeftError``: nothing is loaded."""
Withdraw = Callable[[CheckpointId], Awaitable[None]]
"""Has every replica forget a version, and returns once nothing reads its folder any more. Does not raise."""


class Publication:
    """Who prepares and withdraws versions."""

    def __init__(self) -> None:
        self._prepare: dict[str, Prepare] = {}
        self._withdraw: list[Withdraw] = []

    def register(self, base_model: str, prepare: Prepare, withdraw: Withdraw) -> None:
        """Have ``prepare`` called before a version of a run of ``base_model`` becomes the one that is followed."""
        self._prepare[base_model] = prepare
        self._withdraw.append(withdraw)

    async def withdraw(self, version: CheckpointId) -> None:
        """Call before the version's folder is removed, after its row has gone."""
        for withdraw in self._withdraw:
            await withdraw(version)

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId, directory: Path) -> None:
        """Make ready for ``version``; live samplers may follow it then. Raises ``WeftError``: they must not."""
        found = self._prepare.get(base_model)
        if found is not None:
            await found(run, version, directory)
