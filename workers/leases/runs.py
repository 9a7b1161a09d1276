"""Which trainer has a run: claimed by share of the load, held while its process lives, fenced by a token that grows.

Invariants: a run has one trainer at a time, named in its row together with ``lease_token``; whatever a trainer writes for
a run is written in a transaction that holds the row and finds both unchanged (``Ledger.complete``). A run with work and
without a trainer has a row in ``placements``, the outbox of what is announced, until it is claimed.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from time import monotonic

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RunId
from contracts.ledger_records import OperationState
from ledger.statements import IS_PENDING, IS_TRAINING
from ledger.wakeups import Wakeups, placements_topic, trainer_topic
from store.clock import Clock
from store.database import Database, after_commit
from store.inserts import insert_unless_present
from store.repeat import wait_for
from store.tables import Operation, Placement, Run, RunState, Session
from telemetry.readiness import NotReady
from workers.leases.processes import Heartbeat, ProcessKind, WorkerIdentity, alive, forget, hold_dead

log = logging.getLogger(__name__)

_NET_SECONDS = 5.0
"""Time between two looks for runs that need a trainer and are not among the placements."""
_MOST_AT_ONCE = 256
_IDLE = timedelta(seconds=30)
"""A run that moves costs its next operation a restore; one that is trained all the while stays."""


class RunLeases:
    """One trainer's leases on the runs of its base model."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        database: Database,
        wakeups: Wakeups,
        clock: Clock,
        lease: timedelta,
        moved: Callable[[str], None],
    ) -> None:
        """``lease`` is how long others wait for a sign of life before they take over; ``moved`` counts moves by reason."""
        self.identity = identity
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._heartbeat = Heartbeat(identity, database=database, clock=clock, lease=lease)
        self._moved = moved
        self._on_claimed: Callable[[], None] = _nobody_to_tell
        self._stopping = False
        self._swept = float("-inf")

    def tell_claims(self, on_claimed: Callable[[], None]) -> None:
        """``on_claimed`` hears that there is work of runs that are new to this trainer."""
        self._on_claimed = on_claimed

    async def run(self) -> None:
        """Renew, and claim runs that wait for a trainer, until ``stop``."""
        topic = placements_topic(self.identity.base_model)
        with self._wakeups.listen(topic) as event:
            while not self._stopping:
                try:
                    await self.look()
                except Exception:
                    log.exception("leases of %s could not be looked after; trying again", self.identity.id)
                await wait_for(event, _NET_SECONDS if self._heartbeat.is_alone else self._heartbeat.renewal_seconds)

    def stop(self) -> None:
        """End ``run``; what is leased stays so until ``release_all``, or until the lease ends."""
        self._stopping = True
        self._wakeups.announce(placements_topic(self.identity.base_model))

    async def look(self) -> None:
        """Renew if it is time, take from the dead, claim this trainer's share of what waits."""
        if self._heartbeat.is_due:
            await self._heartbeat.renew()
            await self._reap()
        if monotonic() - self._swept >= _NET_SECONDS:
            self._swept = monotonic()
            await self._place_unplaced()
        if await self._claim():
            self._on_claimed()

    @property
    def may_judge(self) -> bool:
        """Whether who was not heard of for long is dead: it was not cut off together with this trainer."""
        return self._heartbeat.is_given and self._heartbeat.may_judge

    async def check(self) -> None:
        """Others know that this trainer lives. Raises ``NotReady``."""
        if not self._heartbeat.is_given:
            raise NotReady("this trainer cannot renew its lease")

    async def _place_unplaced(self) -> None:
        """The net: an operation that was accepted while its run's trainer died may have left no placement."""
        async with self._database.read() as session:
            runs = await unplaced(session, self.identity.base_model)
        if runs:
            async with self._database.write() as transaction:
                await _place(transaction, runs, self._clock())

    async def _reap(self) -> None:
        """Runs of dead trainers wait for another one."""
        kind, base_model = ProcessKind.TRAINER, self.identity.base_model
        async with self._database.write() as transaction:
            known_only = not self._heartbeat.may_judge
            dead = await hold_dead(transaction, kind, base_model, self._clock, known_only=known_only)
            await reap_trainers(transaction, dead, self._clock(), self._moved)

    async def _claim(self) -> int:
        """Claim runs, those that wait longest first, as long as this trainer has no more than its share; says how many."""
        base_model = self.identity.base_model
        async with self._database.read() as session:
            waiting = await session.scalar(
                select(func.count()).select_from(Placement).where(Placement.base_model == base_model)
            )
            if not waiting:
                return 0
            trainers = set(await alive(session, ProcessKind.TRAINER, base_model, self._clock)) | {self.identity.id}
            held = await _held(session, sorted(trainers))
        share = -(-(sum(held.values()) + waiting) // len(trainers))
        room = min(share - held.get(self.identity.id, 0), _MOST_AT_ONCE)
        if room <= 0:
            return 0
        async with self._database.write() as transaction:
            return await self._take(transaction, room)

    async def _take(self, transaction: AsyncSession, most: int) -> int:
        oldest = (
            select(Placement.run_id)
            .where(Placement.base_model == self.identity.base_model)
            .order_by(Placement.created_at, Placement.run_id)
            .limit(most)
            .with_for_update(skip_locked=True)
        )
        wanted = list(await transaction.scalars(oldest))
        if not wanted:
            return 0
        claimed = await transaction.scalars(
            update(Run)
            .where(Run.id.in_(wanted), Run.trainer_id.is_(None))
            .values(trainer_id=self.identity.id, lease_token=Run.lease_token + 1)
            .returning(Run.id)
        )
        found = list(claimed)
        await transaction.execute(delete(Placement).where(Placement.run_id.in_(wanted)))
        # The API did not know yet that these have a trainer: that one is told.
        others = await transaction.scalars(
            select(Run.trainer_id).where(Run.id.in_(set(wanted) - set(found)), Run.trainer_id.is_not(None)).distinct()
        )
        for trainer in filter(None, others):
            after_commit(transaction, partial(self._wakeups.announce, trainer_topic(trainer)))
        for _ in found:
            after_commit(transaction, partial(self._moved, "claimed"))
        if found:
            log.info("trainer %s has %d more runs", self.identity.id, len(found))
        return len(found)

    async def ended(self) -> list[RunId]:
        """Runs of this trainer whose session is over: nobody can train them any more."""
        async with self._database.read() as session:
            ended = await session.scalars(
                select(Run.id)
                .join(Session, Session.id == Run.session_id)
                .where(Run.trainer_id == self.identity.id, Session.ended_at.is_not(None))
                .limit(_MOST_AT_ONCE)
            )
            return [RunId(run_id) for run_id in ended]

    async def surplus(self) -> list[RunId]:
        """Runs that were idle for a while, as many as this trainer has beyond its share while others have less."""
        base_model = self.identity.base_model
        async with self._database.read() as session:
            trainers = set(await alive(session, ProcessKind.TRAINER, base_model, self._clock)) | {self.identity.id}
            held = await _held(session, sorted(trainers))
            beyond = held.get(self.identity.id, 0) - -(-sum(held.values()) // len(trainers))
            if beyond <= 0:
                return []
            runs = await session.scalars(
                select(Run.id)
                .where(Run.trainer_id == self.identity.id, Run.state == RunState.READY)
                .where(Run.last_request_at < self._clock() - _IDLE)
                .order_by(Run.last_request_at)
                .limit(min(beyond, _MOST_AT_ONCE))
            )
            return [RunId(run) for run in runs]

    async def release(self, runs: Sequence[str]) -> None:
        """Let go of idle runs; for those that get work in this moment another trainer is found."""
        async with self._database.write() as transaction:
            await transaction.execute(
                update(Run)
                .where(Run.id.in_(runs), Run.trainer_id == self.identity.id)
                .values(trainer_id=None, lease_token=Run.lease_token + 1)
            )
            await _place(transaction, runs, self._clock())

    async def release_all(self) -> None:
        """Hand every run over, in an orderly end: others need not wait for the lease to end."""
        async with self._database.write() as transaction:
            await _release(transaction, self.identity.id, self._clock())
            await forget(transaction, [self.identity.id])
            topic = placements_topic(self.identity.base_model)
            after_commit(transaction, lambda: self._wakeups.announce(topic))


async def reap_trainers(
    transaction: AsyncSession, dead: Sequence[str], now: datetime, moved: Callable[[str], None]
) -> None:
    """Free the runs of dead trainers, whose rows the caller holds, and remove these."""
    for trainer in dead:
        runs = await _release(transaction, trainer, now)
        for _ in range(runs):
            after_commit(transaction, partial(moved, "expired"))
        log.warning("trainer %s is dead; its %d runs go to others", trainer, runs)
    if dead:
        await forget(transaction, dead)


async def _held(session: AsyncSession, trainers: Sequence[str]) -> dict[str, int]:
    """How many runs each of the trainers has; those with none are left out."""
    rows = await session.execute(
        select(Run.trainer_id, func.count())
        .where(Run.trainer_id.in_(trainers), Run.state.in_([RunState.CREATING, RunState.READY]))
        .group_by(Run.trainer_id)
    )
    return {trainer: count for trainer, count in rows if trainer is not None}


async def _release(transaction: AsyncSession, trainer: str, now: datetime) -> int:
    """Free the trainer's runs; those with work become placements. Returns how many it had."""
    freed = await transaction.scalars(
        update(Run)
        .where(Run.trainer_id == trainer)
        .values(trainer_id=None, lease_token=Run.lease_token + 1)
        .returning(Run.id)
    )
    runs = list(freed)
    for first in range(0, len(runs), _MOST_AT_ONCE):
        await _place(transaction, runs[first : first + _MOST_AT_ONCE], now)
    return len(runs)


async def _place(transaction: AsyncSession, runs: Sequence[str], now: datetime) -> None:
    """Placements for those of the runs that have work."""
    has_work = exists().where(Operation.lane == Run.id, Operation.state == OperationState.PENDING)
    found = await transaction.execute(
        select(Run.id, Run.tenant_id, Run.base_model).where(Run.id.in_(runs), Run.trainer_id.is_(None), has_work)
    )
    rows = [
        {"run_id": row.id, "tenant_id": row.tenant_id, "base_model": row.base_model, "created_at": now} for row in found
    ]
    if rows:
        await transaction.execute(insert_unless_present(transaction, Placement).values(rows))


async def unplaced(session: AsyncSession, base_model: str) -> list[str]:
    """Runs with work that have neither a trainer nor a placement."""
    found = await session.scalars(
        select(Operation.lane)
        .join(Run, Run.id == Operation.lane)
        .where(
            IS_PENDING,
            IS_TRAINING,
            Operation.base_model == base_model,
            Run.trainer_id.is_(None),
            ~exists().where(Placement.run_id == Run.id),
        )
        .distinct()
        .limit(_MOST_AT_ONCE)
    )
    return list(found)


def _nobody_to_tell() -> None:
    return
