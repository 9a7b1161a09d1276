"""Publication of trained weights: replicas load a version before samplers follow it, and unload it before it is deleted."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Protocol

from contracts.errors import WeftError
from contracts.ids import CheckpointId, RunId

log = logging.getLogger(__name__)

Prepare = Callable[[RunId, CheckpointId], Awaitable[None]]
"""Loads a version of a run on the replicas that sample the run. Raises ``WeftError``: then no replica keeps the version."""
Withdraw = Callable[[CheckpointId], Awaitable[None]]
"""Unloads a version from every replica, so that nothing reads its folder any more. Waits for no sample.

Raises ``WeftError`` when a sample draws from it or a living replica keeps it.
"""
WITHDRAWAL = timedelta(seconds=10)
"""Longest wait for a withdrawal. What still reads the version then is asked again later."""


class Publication(Protocol):
    """Interface to the processes that sample a base model: this process or others."""

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """Load ``version`` so that live samplers may follow it. Raises ``WeftError`` if live samplers must not.

        ``Unavailable``: the version cannot be read now. The call may be repeated.
        """

    async def withdraw(self, versions: Sequence[CheckpointId]) -> set[CheckpointId]:
        """Unload the versions everywhere, and return those whose folders nothing reads any more.

        Call it after the versions' rows are deleted and before their folders are removed.
        """


class LocalPublication:
    """Publication inside one process. For an unregistered base model nothing is loaded before a version's first sample."""

    def __init__(self) -> None:
        self._prepare: dict[str, Prepare] = {}
        self._withdraw: list[Withdraw] = []

    def register(self, base_model: str, prepare: Prepare, withdraw: Withdraw) -> None:
        """Register the calls that load versions of ``base_model``'s runs, and that unload versions."""
        self._prepare[base_model] = prepare
        self._withdraw.append(withdraw)

    async def prepare(self, base_model: str, run: RunId, version: CheckpointId) -> None:
        """See ``Publication``."""
        if (found := self._prepare.get(base_model)) is not None:
            await found(run, version)

    async def withdraw(self, versions: Sequence[CheckpointId]) -> set[CheckpointId]:
        """See ``Publication``."""
        unread = await asyncio.gather(*(self._is_withdrawn(version) for version in versions))
        return {version for version, is_unread in zip(versions, unread, strict=True) if is_unread}

    async def _is_withdrawn(self, version: CheckpointId) -> bool:
        try:
            async with asyncio.timeout(WITHDRAWAL.total_seconds()):
                for withdraw in self._withdraw:
                    await withdraw(version)
        except (WeftError, TimeoutError) as failure:
            log.warning("version=%s is read still: %s", version, str(failure) or "samples draw from it")
            return False
        return True
