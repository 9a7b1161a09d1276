"""Announces placements: tells trainers, through Celery, that training runs wait for a trainer.

A placement is a database row, written in the transaction of an operation whose run has no trainer. It is announced after
the commit, and again while no trainer claims the run.
"""

import asyncio
import logging
from collections.abc import Iterable
from datetime import timedelta

from celery import Celery
from kombu.exceptions import OperationalError

from contracts.errors import Unavailable
from ledger.runtime import Runtime
from ledger.wakeups import placements_topic
from store.repeat import repeat
from tenants.placements import due_placements, mark_announced
from workers.cluster.celery_app import send_placement

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0
_AGAIN_AFTER = timedelta(seconds=5)


class PlacementAnnouncer:
    """Announces placements: one message for each base model that has any."""

    def __init__(self, celery: Celery, runtime: Runtime) -> None:
        self._celery = celery
        self._runtime = runtime

    async def run(self, base_models: Iterable[str]) -> None:
        """Announce the placements of operations that this process accepts, until cancelled."""
        topics = [placements_topic(base_model) for base_model in base_models]
        with self._runtime.wakeups.listen(*topics) as placed:
            failed = "placements could not be announced"
            await repeat(self._announce_if_reachable, seconds=_SWEEP_SECONDS, wake=placed, failed=failed)

    async def _announce_if_reachable(self) -> None:
        try:
            await self.announce()
        except Unavailable as outage:
            log.warning("placements cannot be read: %s", outage.message)

    async def announce(self) -> int:
        """Announce placements that were not announced lately; return how many base models have one.

        Raises ``Unavailable``.
        """
        now = self._runtime.clock()
        async with self._runtime.database.read() as session:
            due = await due_placements(session, announced_before=now - _AGAIN_AFTER)
        base_models = {one.base_model for one in due}
        for base_model in base_models:
            try:
                await asyncio.to_thread(send_placement, self._celery, base_model)
            except (OperationalError, OSError) as error:
                # Trainers look for placements by themselves, too.
                log.warning("placements of %s could not be announced: %s", base_model, error)
                return 0
        if due:
            async with self._runtime.database.write() as transaction:
                await mark_announced(transaction, [one.run_id for one in due], now)
        return len(base_models)
