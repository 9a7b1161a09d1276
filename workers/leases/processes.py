"""Which training and sampling processes are alive: each renews a row, in the database's time, so that clocks need not agree."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from time import monotonic
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, bindparam, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from store.clock import Clock
from store.database import Database, session_name, this_host
from store.tables import WorkerProcess

_INSERTS: dict[str, Any] = {"sqlite": sqlite_insert, "postgresql": postgres_insert}


RENEWALS = 4
"""In the time of a lease: three may be late before the process counts as dead."""
FOR_EVER = timedelta(days=3650)
"""The lease of a process that is alone with its database: nobody waits for a sign of life of it."""


_END_SESSIONS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name IN :names AND pid <> pg_backend_pid()"
).bindparams(bindparam("names", expanding=True))
_LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
"""When the lease of a process ended that is known to be dead."""


class ProcessKind(StrEnum):
    """What a process does for its base model."""

    TRAINER = "trainer"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One process, as long as it lives: an id is never used again."""

    id: str
    kind: ProcessKind
    base_model: str


def new_identity(kind: ProcessKind, base_model: str) -> WorkerIdentity:
    """An identity for this process."""
    return WorkerIdentity(f"{kind}-{uuid4().hex[:20]}", kind, base_model)


async def database_now(session: AsyncSession, clock: Clock) -> datetime:
    """The time that all processes share: PostgreSQL's; with SQLite there is one machine, and ``clock``."""
    if session.get_bind().dialect.name == "sqlite":
        return clock()
    now: datetime = (await session.execute(select(func.clock_timestamp()))).scalar_one()
    return now


async def renew(transaction: AsyncSession, identity: WorkerIdentity, *, lease: timedelta, clock: Clock) -> None:
    """The process lives for ``lease`` from now on; known or not."""
    now = await database_now(transaction, clock)
    values = {
        "id": identity.id,
        "kind": identity.kind,
        "base_model": identity.base_model,
        "host": this_host(),
        "pid": os.getpid(),
        "started_at": now,
        "expires_at": now + lease,
    }
    insert = _INSERTS[transaction.get_bind().dialect.name](WorkerProcess).values(values)
    await transaction.execute(
        insert.on_conflict_do_update(index_elements=[WorkerProcess.id], set_={"expires_at": now + lease})
    )


async def alive(session: AsyncSession, kind: ProcessKind, base_model: str, clock: Clock) -> list[str]:
    """Ids of the living."""
    now = await database_now(session, clock)
    rows = await session.scalars(
        select(WorkerProcess.id)
        .where(WorkerProcess.kind == kind, WorkerProcess.base_model == base_model, WorkerProcess.expires_at > now)
        .order_by(WorkerProcess.id)
    )
    return list(rows)


async def hold_dead(
    transaction: AsyncSession, kind: ProcessKind, base_model: str, clock: Clock, *, known_only: bool
) -> list[str]:
    """Ids of the dead whose rows are still there, locked; those that another transaction is about to reap are left out.

    Their connections to PostgreSQL are ended, so that nothing of theirs is in the way.
    ``known_only``: those that somebody saw end, and not those that were merely not heard of.
    """
    latest = _LONG_AGO if known_only else await database_now(transaction, clock)
    held = await hold_expired(transaction, latest, WorkerProcess.kind == kind, WorkerProcess.base_model == base_model)
    return [one.id for one in held]


async def hold_expired(
    transaction: AsyncSession, latest: datetime, *which: ColumnElement[bool]
) -> Sequence[WorkerIdentity]:
    """Processes whose lease ended by ``latest``, held as in ``hold_dead``; ``which`` of them, all by default."""
    columns = (WorkerProcess.id, WorkerProcess.kind, WorkerProcess.base_model, WorkerProcess.host, WorkerProcess.pid)
    dead = select(*columns).where(WorkerProcess.expires_at <= latest, *which)
    found = (await transaction.execute(dead)).all()
    if not found:
        return []
    await _end_sessions(transaction, {session_name(row.host, row.pid) for row in found})
    held = await transaction.execute(dead.order_by(WorkerProcess.id).with_for_update(skip_locked=True))
    return [WorkerIdentity(row.id, ProcessKind(row.kind), row.base_model) for row in held]


async def _end_sessions(transaction: AsyncSession, names: Collection[str]) -> None:
    """Have PostgreSQL end what the dead have begun: one that is frozen in mid-statement would keep its rows locked for ever."""
    others = set(names) - {session_name(this_host(), os.getpid())}
    if others and transaction.get_bind().dialect.name == "postgresql":
        await transaction.execute(_END_SESSIONS, {"names": sorted(others)})


async def forget(transaction: AsyncSession, ids: Sequence[str]) -> None:
    """Remove rows of processes that have nothing any more."""
    await transaction.execute(delete(WorkerProcess).where(WorkerProcess.id.in_(ids)))


async def declare_all_dead(transaction: AsyncSession) -> None:
    """For a process that owns its database: whatever was there before has ended."""
    await transaction.execute(update(WorkerProcess).values(expires_at=_LONG_AGO))


async def declare_dead(transaction: AsyncSession, pid: int) -> None:
    """Whoever saw a process of this machine end need not wait for its lease to: others take over at their next look."""
    await transaction.execute(
        update(WorkerProcess)
        .where(WorkerProcess.host == this_host(), WorkerProcess.pid == pid)
        .values(expires_at=_LONG_AGO)
    )


class Heartbeat:
    """One process's renewals, and what they entitle it to."""

    def __init__(self, identity: WorkerIdentity, *, database: Database, clock: Clock, lease: timedelta) -> None:
        self.identity = identity
        # Alone with its database: nobody waits for a sign of life, and an idle service does not write.
        self.is_alone = database.has_one_service
        self.renewal_seconds = lease.total_seconds() / RENEWALS
        self._database = database
        self._clock = clock
        self._lease = FOR_EVER if self.is_alone else lease
        self._renewed = self._unbroken_since = float("-inf")

    @property
    def is_due(self) -> bool:
        """Whether it is time to renew."""
        if self.is_alone:
            return self._renewed == float("-inf")
        return monotonic() - self._renewed >= self.renewal_seconds / 2

    @property
    def is_given(self) -> bool:
        """Whether others can know that this process lives."""
        return monotonic() - self._renewed < self._lease.total_seconds()

    @property
    def may_judge(self) -> bool:
        """Whether who was not heard of is dead: not, when all of them may have been cut off together until just now."""
        return self.is_alone or monotonic() - self._unbroken_since >= self._lease.total_seconds()

    async def renew(self) -> None:
        """Raises ``Unavailable``."""
        async with self._database.write() as transaction:
            await renew(transaction, self.identity, lease=self._lease, clock=self._clock)
        now = monotonic()
        if now - self._renewed >= self._lease.total_seconds():
            self._unbroken_since = now
        self._renewed = now
