"""The outbox of placements: rows written with the operation that needs a trainer, announced after the commit."""

import asyncio
import logging
from collections.abc import Iterable
from datetime import timedelta

from celery import Celery
from kombu.exceptions import OperationalError
from sqlalchemy import or_, select, update

from contracts.errors import Unavailable
from ledger.wakeups import Wakeups, placements_topic
from store.clock import Clock
from store.database import Database
from store.repeat import wait_for
from store.tables import Placement
from workers.cluster.celery_app import send_placement

log = logging.getLogger(__name__)

_SWEEP_SECONDS = 5.0
_AGAIN_AFTER = timedelta(seconds=5)
_MOST_AT_ONCE = 256


class PlacementAnnouncer:
    """Tells trainers through Celery of the runs that wait for one: every base model with news gets one message."""

    def __init__(self, celery: Celery, *, database: Database, wakeups: Wakeups, clock: Clock) -> None:
        self._celery = celery
        self._database = database
        self._wakeups = wakeups
        self._clock = clock

    async def run(self, base_models: Iterable[str]) -> None:
        """Announce whatever this process accepts, until cancelled."""
        with self._wakeups.listen(*(placements_topic(base_model) for base_model in base_models)) as event:
            while True:
                event.clear()
                try:
                    await self.announce()
                except Unavailable as outage:
                    log.warning("placements cannot be read: %s", outage.message)
                await wait_for(event, _SWEEP_SECONDS)

    async def announce(self) -> int:
        """Announce placements that nobody was told of, or not lately; says how many base models there was news of.

        Raises ``Unavailable``.
        """
        now = self._clock()
        due = or_(Placement.announced_at.is_(None), Placement.announced_at < now - _AGAIN_AFTER)
        async with self._database.read() as session:
            rows = list(
                await session.execute(
                    select(Placement.run_id, Placement.base_model)
                    .where(due)
                    .order_by(Placement.created_at)
                    .limit(_MOST_AT_ONCE)
                )
            )
        base_models = {row.base_model for row in rows}
        for base_model in base_models:
            try:
                await asyncio.to_thread(send_placement, self._celery, base_model)
            except (OperationalError, OSError) as error:
                # Trainers look by themselves, too.
                log.warning("placements of %s could not be announced: %s", base_model, error)
                return 0
        if rows:
            async with self._database.write() as transaction:
                await transaction.execute(
                    update(Placement)
                    .where(Placement.run_id.in_([row.run_id for row in rows]))
                    .values(announced_at=now)
                    .execution_options(synchronize_session=False)
                )
        return len(base_models)
