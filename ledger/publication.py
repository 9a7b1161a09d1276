"""Getting versions onto replicas before live samplers follow them, and off before their folders go."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from contracts.ids import CheckpointId, RunId

Prepare = Callable[[RunId, CheckpointId], Awaitable[None]]
"""Loads a version of a run where samples of that run are made. Raises ``WeftError``: nothing is loaded."""
Withdraw = Callable[[CheckpointId], Awaitable[None]]
"""Has every replica forget a version, and returns once nothing reads its folder any more. Does not raise."""


class Publication(Protocol):
    """Reaches whoever samples a base model, in this process or in others."""

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """Make ready for ``version``; live samplers may follow it then. Raises ``WeftError``: they must not."""

    async def withdraw(self, version: CheckpointId) -> None:
        """Call before the version's folder is removed, after its row has gone."""


class LocalPublication:
    """Where everything is in one process. A base model that nobody has registered loads a version with its first sample."""

    def __init__(self) -> None:
        self._prepare: dict[str, Prepare] = {}
        self._withdraw: list[Withdraw] = []

    def register(self, base_model: str, prepare: Prepare, withdraw: Withdraw) -> None:
        """Have ``prepare`` called before a version of a run of ``base_model`` becomes the one that is followed."""
        self._prepare[base_model] = prepare
        self._withdraw.append(withdraw)

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """See ``Publication``."""
        if (found := self._prepare.get(base_model)) is not None:
            await found(run, version)

    async def withdraw(self, version: CheckpointId) -> None:
        """See ``Publication``."""
        for withdraw in self._withdraw:
            await withdraw(version)
