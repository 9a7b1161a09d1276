"""States of sampling processes and replicas, as operators see them."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.tables import DirectedReplica, Operation, PoolState, ProcessKind, SampleInFlight, WorkerProcess
from tenants.replica_directives import ReplicaDirective, standing_directive_of


@dataclass(frozen=True, slots=True)
class ReplicaStanding:
    """State of a replica. ``directive`` None: it works, ``in_flight`` samples now."""

    base_model: str
    replica: str
    directive: ReplicaDirective | None
    reason: str | None
    since: datetime | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class PoolStanding:
    """State of a sampling process: its lease ends at ``expires_at``, by the database's clock."""

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


async def list_replicas(session: AsyncSession, base_model: str | None) -> list[ReplicaStanding]:
    """Return the replicas that draw samples now and those with a directive: of a base model, or of all."""
    drawing = select(SampleInFlight.base_model, SampleInFlight.replica, func.count().label("drawn")).group_by(
        SampleInFlight.base_model, SampleInFlight.replica
    )
    directed = select(DirectedReplica)
    if base_model is not None:
        drawing = drawing.where(SampleInFlight.base_model == base_model)
        directed = directed.where(DirectedReplica.base_model == base_model)
    counts = {(row.base_model, row.replica): row.drawn for row in await session.execute(drawing)}
    directives = {(row.base_model, row.replica): row for row in await session.scalars(directed)}
    found = []
    for key in sorted(counts.keys() | directives.keys()):
        row = directives.get(key)
        standing = None if row is None else standing_directive_of(row)
        found.append(
            ReplicaStanding(
                base_model=key[0],
                replica=key[1],
                directive=None if standing is None else standing.directive,
                reason=None if standing is None else standing.reason,
                since=None if standing is None else standing.since,
                in_flight=counts.get(key, 0),
            )
        )
    return found


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
            state=PoolState(row.pool_state),
            claimed=claims,
            in_flight=draws,
            release=row.release,
        )
        for row, claims, draws in rows
    ]
