"""Publication of adapter versions: replicas load a version before samplers use it, and unload it before its folder goes."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from contracts.ids import CheckpointId, RunId

Prepare = Callable[[RunId, CheckpointId], Awaitable[None]]
"""Loads a run's version on the replicas that sample the run. Raises ``WeftError`` when nothing was loaded."""
Withdraw = Callable[[CheckpointId], Awaitable[None]]
"""Unloads a version from every replica. Returns once nothing reads its folder any more. Does not raise."""


class Publication(Protocol):
    """Reaches the samplers of a base model, in this process or in others."""

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """Load ``version`` before live samplers follow it. Raises ``WeftError``: live samplers must not follow it."""

    async def withdraw(self, version: CheckpointId) -> None:
        """Unload the version. Call it after its row was deleted and before its folder is removed."""


class LocalPublication:
    """Publication inside one process. Base models that are not registered load a version with its first sample."""

    def __init__(self) -> None:
        self._prepare: dict[str, Prepare] = {}
        self._withdraw: list[Withdraw] = []

    def register(self, base_model: str, prepare: Prepare, withdraw: Withdraw) -> None:
        """Register the functions that load and unload versions of runs of ``base_model``."""
        self._prepare[base_model] = prepare
        self._withdraw.append(withdraw)

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """Load the version on this process's replicas."""
        if (found := self._prepare.get(base_model)) is not None:
            await found(run, version)

    async def withdraw(self, version: CheckpointId) -> None:
        """Unload the version from this process's replicas."""
        for withdraw in self._withdraw:
            await withdraw(version)
