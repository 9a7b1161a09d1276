"""The table of worker processes: each process renews its row's lease, and counts as dead when it ends.

Leases are in the database's time, so that the clocks of the machines need not agree.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from time import monotonic
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, bindparam, delete, select, text, update
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.pass_report import EndedPass
from store.clock import Clock
from store.database import session_name, this_host
from store.database_clock import database_now
from store.tables import EndedProcess, PoolState, ProcessKind, WorkerProcess
from tenants.worker_standings import ToldReplica

_INSERTS: dict[str, Any] = {"sqlite": sqlite_insert, "postgresql": postgres_insert}

_END_SESSIONS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name IN :names AND pid <> pg_backend_pid()"
).bindparams(bindparam("names", expanding=True))
EXITED_AT = datetime(2000, 1, 1, tzinfo=UTC)
"""End of the lease of a process that is known to have exited."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of one process for as long as it lives; an id is never used again."""

    id: str
    kind: ProcessKind
    base_model: str
    capacity: int | None = None
    """Tokens of a trainer's pass, or samples that a pool holds at once."""
    release: str | None = None
    """Version of weft that the process runs."""


def new_identity(kind: ProcessKind, base_model: str = "", capacity: int | None = None) -> WorkerIdentity:
    """Return a new identity for this process. An API process has no base model."""
    return WorkerIdentity(f"{kind}-{uuid4().hex[:20]}", kind, base_model, capacity, version("weft"))


async def renew(
    transaction: AsyncSession, identity: WorkerIdentity, *, lease: timedelta, clock: Clock, is_ending: bool = False
) -> datetime:
    """Have the process's lease end ``lease`` from now; insert its row if there is none. Return the time of the row's insertion.

    ``is_ending``: the process takes no more work.
    """
    now = await database_now(transaction, clock)
    renewed: dict[str, object] = {"expires_at": now + lease}
    if is_ending:
        renewed["ending_at"] = now
    values = renewed | {
        "id": identity.id,
        "kind": identity.kind,
        "base_model": identity.base_model,
        "host": this_host(),
        "pid": os.getpid(),
        "started_at": now,
        "capacity": identity.capacity,
        "release": identity.release,
    }
    insert = _INSERTS[transaction.get_bind().dialect.name](WorkerProcess).values(values)
    upsert = insert.on_conflict_do_update(index_elements=[WorkerProcess.id], set_=renewed)
    began: datetime = (await transaction.execute(upsert.returning(WorkerProcess.started_at))).scalar_one()
    if began == now:
        await _drain_again(transaction, identity.id)
    return began


async def _drain_again(transaction: AsyncSession, process: str) -> None:
    """Drain a process that was taken for dead when it was drained, and whose row is new.

    A statement of its own: the insertion may have waited for the transaction that took the process for dead, unseen.
    """
    ended = EndedProcess.id == process
    drain = {
        name: select(getattr(EndedProcess, name)).where(ended).scalar_subquery()
        for name in ("drained_at", "drain_reason")
    }
    await transaction.execute(
        update(WorkerProcess)
        .where(WorkerProcess.id == process)
        .values(drain)
        .execution_options(synchronize_session=False)
    )


async def tell_pool(
    transaction: AsyncSession, identity: WorkerIdentity, state: PoolState, replicas: Sequence[ToldReplica]
) -> bool:
    """Record whether a sampling process takes samples, and its replicas. Return whether the process has a row."""
    found = await transaction.execute(
        update(WorkerProcess)
        .where(WorkerProcess.id == identity.id)
        .values(pool_state=state, replicas=[asdict(one) for one in replicas])
        .returning(WorkerProcess.id)
        .execution_options(synchronize_session=False)
    )
    return found.scalar() is not None


async def tell_trainer(
    transaction: AsyncSession, identity: WorkerIdentity, runs: Sequence[str], last_pass: EndedPass | None, clock: Clock
) -> bool:
    """Record which runs' adapters are in a trainer's memory, and its last pass. Return whether the process has a row."""
    told: dict[str, object] = {"resident_runs": list(runs)}
    if last_pass is not None:
        report, age = last_pass.report, timedelta(seconds=monotonic() - last_pass.at)
        told |= {
            "pass_ended_at": await database_now(transaction, clock) - age,
            "pass_seconds": report.seconds,
            "pass_tokens": report.tokens,
            "pass_positions": report.padded_tokens,
            "pass_sequences": report.sequences,
            "pass_adapters": report.adapters,
            "pass_tenants": last_pass.tenants,
        }
    found = await transaction.execute(
        update(WorkerProcess)
        .where(WorkerProcess.id == identity.id)
        .values(told)
        .returning(WorkerProcess.id)
        .execution_options(synchronize_session=False)
    )
    return found.scalar() is not None


async def some_pool_has_replicas(session: AsyncSession, base_model: str, clock: Clock) -> bool:
    """Return whether a replica of some living sampling process of ``base_model`` answers, drained or not."""
    now = await database_now(session, clock)
    found = await session.scalar(
        select(WorkerProcess.id)
        .where(
            WorkerProcess.kind == ProcessKind.POOL,
            WorkerProcess.base_model == base_model,
            WorkerProcess.expires_at > now,
            WorkerProcess.pool_state != PoolState.NO_REPLICA,
        )
        .limit(1)
    )
    return found is not None


async def alive(
    session: AsyncSession, kind: ProcessKind, base_model: str, clock: Clock, *, takes_work: bool = False
) -> list[str]:
    """Return the ids of the living processes of a kind, in order; ``takes_work`` leaves out those that are drained or end."""
    now = await database_now(session, clock)
    found = select(WorkerProcess.id).where(
        WorkerProcess.kind == kind, WorkerProcess.base_model == base_model, WorkerProcess.expires_at > now
    )
    if takes_work:
        found = found.where(WorkerProcess.drained_at.is_(None), WorkerProcess.ending_at.is_(None))
    return list(await session.scalars(found.order_by(WorkerProcess.id)))


async def lock_dead_peers(transaction: AsyncSession, identity: WorkerIdentity, latest: datetime) -> list[str]:
    """Lock the rows of the process's peers whose lease ended by ``latest`` and return their ids; see ``lock_expired``."""
    is_peer = (
        WorkerProcess.kind == identity.kind,
        WorkerProcess.base_model == identity.base_model,
        WorkerProcess.id != identity.id,
    )
    return [one.id for one in await lock_expired(transaction, latest, *is_peer)]


async def lock_expired(
    transaction: AsyncSession, latest: datetime, *which: ColumnElement[bool]
) -> Sequence[WorkerIdentity]:
    """Lock the rows of processes whose lease ended by ``latest`` and that fulfil all of ``which``; return the processes.

    Rows that another transaction has locked, since it reaps the process, are left out. The connections of trainers and
    sampling processes to PostgreSQL are ended, so that none of their transactions is in the way. An API process holds
    nothing that others wait for: it goes on with its requests if it was only slow.
    """
    columns = (WorkerProcess.id, WorkerProcess.kind, WorkerProcess.base_model, WorkerProcess.host, WorkerProcess.pid)
    dead = select(*columns).where(WorkerProcess.expires_at <= latest, *which)
    found = (await transaction.execute(dead)).all()
    if not found:
        return []
    names = {session_name(row.host, row.pid) for row in found if row.kind != ProcessKind.API}
    await _end_sessions(transaction, names - await _names_of_others(transaction, latest, [row.pid for row in found]))
    locked = await transaction.execute(dead.order_by(WorkerProcess.id).with_for_update(skip_locked=True))
    # Another version's kinds of processes are reaped by that version.
    mine = [row for row in locked if row.kind in [*ProcessKind]]
    return [WorkerIdentity(row.id, ProcessKind(row.kind), row.base_model) for row in mine]


async def _names_of_others(transaction: AsyncSession, latest: datetime, pids: Collection[int]) -> set[str]:
    """Return the sessions' names of living processes with these pids: a container restarts with the old host name and pid."""
    living = select(WorkerProcess.host, WorkerProcess.pid).where(
        WorkerProcess.expires_at > latest, WorkerProcess.pid.in_(pids)
    )
    return {session_name(row.host, row.pid) for row in await transaction.execute(living)}


async def _end_sessions(transaction: AsyncSession, names: Collection[str]) -> None:
    """Have PostgreSQL end the named sessions. A process frozen in the middle of a transaction would keep rows locked."""
    others = set(names) - {session_name(this_host(), os.getpid())}
    if others and transaction.get_bind().dialect.name == "postgresql":
        await transaction.execute(_END_SESSIONS, {"names": sorted(others)})


async def remove_processes(transaction: AsyncSession, ids: Sequence[str]) -> None:
    """Delete the rows of processes that have no runs, samples or commands any more."""
    await transaction.execute(delete(WorkerProcess).where(WorkerProcess.id.in_(ids)))


async def declare_all_dead(transaction: AsyncSession) -> None:
    """Expire every lease: the caller owns its database, so every process recorded there has exited."""
    await transaction.execute(update(WorkerProcess).values(expires_at=EXITED_AT))


async def declare_dead(transaction: AsyncSession, pid: int) -> None:
    """Expire the lease of a local process that is known to have exited. Its peers reap it at their next look."""
    await transaction.execute(
        update(WorkerProcess)
        .where(WorkerProcess.host == this_host(), WorkerProcess.pid == pid)
        .values(expires_at=EXITED_AT)
    )
