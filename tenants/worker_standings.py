"""States of sampling processes, their replicas, and API processes, as operators see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.stored_words import known
from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.tables import (
    DirectedReplica,
    Operation,
    PoolState,
    ProcessKind,
    ReplicaCondition,
    SampleInFlight,
    WorkerProcess,
)
from tenants.replica_directives import ReplicaDirective, standing_directive_of


@dataclass(frozen=True, slots=True)
class ToldReplica:
    """A replica as its sampling process tells it. ``adapters``: versions that were asked for on it since it started.

    ``condition``: None for one that only another version knows.
    """

    name: str
    condition: ReplicaCondition | None
    adapters: int


@dataclass(frozen=True, slots=True)
class ReplicaStanding:
    """State of a replica, with the operator's ``directive`` if one stands. ``in_flight``: samples that it draws now.

    ``process``: its sampling process, with whether that is alive. None, as ``condition`` and ``adapters``, for a replica that no
    sampling process has told of.
    """

    base_model: str
    replica: str
    directive: ReplicaDirective | None
    reason: str | None
    since: datetime | None
    in_flight: int
    process: str | None
    is_alive: bool
    condition: ReplicaCondition | None
    adapters: int | None


@dataclass(frozen=True, slots=True)
class PoolStanding:
    """State of a sampling process: its lease ends at ``expires_at``, by the database's clock.

    ``state``: ``no_replica`` for one that only another version knows, which is not counted on for samples either.
    """

    id: str
    base_model: str
    host: str
    pid: int
    started_at: datetime
    expires_at: datetime
    state: PoolState
    claimed: int
    """Samples that the process has claimed."""
    in_flight: int
    """Samples of the process that replicas draw now."""
    release: str | None
    """Version of weft that it runs."""


@dataclass(frozen=True, slots=True)
class ApiStanding:
    """State of an API process: its lease ends at ``expires_at``, by the database's clock."""

    id: str
    host: str
    pid: int
    started_at: datetime
    expires_at: datetime
    release: str | None
    """Version of weft that it runs."""


async def list_replicas(session: AsyncSession, base_model: str | None, now: datetime) -> list[ReplicaStanding]:
    """Return the replicas of sampling processes, those that draw samples and those with a directive: of a base or of all.

    ``now`` is by the database's clock.
    """
    drawing = select(SampleInFlight.base_model, SampleInFlight.replica, func.count().label("drawn")).group_by(
        SampleInFlight.base_model, SampleInFlight.replica
    )
    directed, pools = select(DirectedReplica), select(WorkerProcess).where(WorkerProcess.kind == ProcessKind.POOL)
    if base_model is not None:
        drawing = drawing.where(SampleInFlight.base_model == base_model)
        directed = directed.where(DirectedReplica.base_model == base_model)
        pools = pools.where(WorkerProcess.base_model == base_model)
    counts = {(row.base_model, row.replica): row.drawn for row in await session.execute(drawing)}
    directives = {(row.base_model, row.replica): row for row in await session.scalars(directed)}
    told = _told(list(await session.scalars(pools)))
    found = []
    for key in sorted(counts.keys() | directives.keys() | told.keys()):
        row = directives.get(key)
        standing = None if row is None else standing_directive_of(row)
        process, replica = told.get(key, (None, None))
        found.append(
            ReplicaStanding(
                base_model=key[0],
                replica=key[1],
                directive=None if standing is None else standing.directive,
                reason=None if standing is None else standing.reason,
                since=None if standing is None else standing.since,
                in_flight=counts.get(key, 0),
                process=None if process is None else process.id,
                is_alive=process is None or process.expires_at > now,
                condition=None if replica is None else replica.condition,
                adapters=None if replica is None else replica.adapters,
            )
        )
    return found


def _told(pools: Sequence[WorkerProcess]) -> dict[tuple[str, str], tuple[WorkerProcess, ToldReplica]]:
    """Return each replica that a sampling process has told of; of two processes with one, the one whose lease ends later."""
    found = {}
    for pool in sorted(pools, key=lambda one: one.expires_at):
        for one in pool.replicas or ():
            replica = ToldReplica(one["name"], known(ReplicaCondition, one["condition"], None), one["adapters"])
            found[pool.base_model, replica.name] = (pool, replica)
    return found


async def list_apis(session: AsyncSession) -> list[ApiStanding]:
    """Return every recorded API process, by the time of its start."""
    rows = await session.scalars(
        select(WorkerProcess)
        .where(WorkerProcess.kind == ProcessKind.API)
        .order_by(WorkerProcess.started_at, WorkerProcess.id)
    )
    return [ApiStanding(row.id, row.host, row.pid, row.started_at, row.expires_at, row.release) for row in rows]


async def list_pools(session: AsyncSession) -> list[PoolStanding]:
    """Return every recorded sampling process, by base model and time of its start."""
    claimed = (
        select(func.count())
        .select_from(Operation)
        .where(IS_PENDING, IS_SAMPLE, Operation.taken_by == WorkerProcess.id)
        .scalar_subquery()
    )
    drawn = (
        select(func.count())
        .select_from(SampleInFlight)
        .where(SampleInFlight.process == WorkerProcess.id)
        .scalar_subquery()
    )
    rows = await session.execute(
        select(WorkerProcess, claimed, drawn)
        .where(WorkerProcess.kind == ProcessKind.POOL)
        .order_by(WorkerProcess.base_model, WorkerProcess.started_at, WorkerProcess.id)
    )
    return [
        PoolStanding(
            id=row.id,
            base_model=row.base_model,
            host=row.host,
            pid=row.pid,
            started_at=row.started_at,
            expires_at=row.expires_at,
            state=known(PoolState, row.pool_state, PoolState.NO_REPLICA),
            claimed=claims,
            in_flight=draws,
            release=row.release,
        )
        for row, claims, draws in rows
    ]
