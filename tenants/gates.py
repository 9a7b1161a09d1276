"""The gate of an adapter, shared by every process through the database.

A gate is open, or closed in one of three modes until it is resumed or expires. Whoever changes it last wins: pausing what
is paused takes over mode, reason and expiry. ``generation`` grows with every change, so that a controller can tell that
another one came between, and can resume only what it paused itself.

A sample may run while a row in ``samples_in_flight`` says so; that row is written in a transaction that has seen the gate
open and holds it. So once a pause has committed, only the rows that are there then remain to be waited for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import cast

from sqlalchemy import ColumnElement, Table, bindparam, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from contracts.ids import RequestId, RunId, TenantId
from store.batcher import few_lengths
from store.clock import Clock
from store.database import insert_unless_present, replacing_insert
from store.tables import AdapterGate, SampleInFlight


class GateMode(StrEnum):
    """What a pause does to samples in flight; new ones wait in every mode.

    ``abort`` ends them with the tokens so far, ``wait`` lets them end, ``keep`` cuts them and goes on after the resume.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate as it stands. ``mode`` None: open."""

    generation: int = 0
    mode: GateMode | None = None
    reason: str | None = None
    since: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A sample that goes to a replica now; ``run`` None samples the bare base."""

    operation: RequestId
    tenant: TenantId
    base_model: str
    run: RunId | None
    version: str | None
    replica: str
    process: str


@dataclass(frozen=True, slots=True)
class Pause:
    """What a controller asks for."""

    mode: GateMode
    reason: str | None = None
    ttl: timedelta | None = None


_HELD = (
    select(AdapterGate.run_id, AdapterGate.mode, AdapterGate.expires_at)
    .where(AdapterGate.run_id.in_(bindparam("keys", expanding=True)))
    .order_by(AdapterGate.run_id)
    .with_for_update(read=True)
)
_LEAVE = (
    delete(SampleInFlight)
    .where(
        SampleInFlight.operation_id.in_(bindparam("operations", expanding=True)),
        SampleInFlight.process == bindparam("process"),
    )
    .returning(SampleInFlight.operation_id)
    .execution_options(synchronize_session=False)
)
# Rows that another transaction has are about to be deleted, or written anew: they need no note, and are not waited for.
_MOVE = (
    update(cast(Table, SampleInFlight.__table__))
    .where(
        SampleInFlight.operation_id.in_(
            select(SampleInFlight.operation_id)
            .where(
                SampleInFlight.operation_id.in_(bindparam("operations", expanding=True)),
                SampleInFlight.process == bindparam("of_process"),
            )
            .with_for_update(skip_locked=True)
        )
    )
    .values(version=bindparam("to_version"), replica=bindparam("to_replica"))
)


def pool_gate(base_model: str) -> str:
    """The key of the gate before every sample of a base model."""
    return f"pool:{base_model}"


async def gate_of(session: AsyncSession, key: str, clock: Clock) -> Gate:
    """The gate of a run, or of a pool; open when nobody ever touched it."""
    row = await session.get(AdapterGate, key, populate_existing=True)
    return Gate() if row is None else _gate(row, clock())


async def closed_gates(session: AsyncSession, base_model: str, clock: Clock) -> dict[str, Gate]:
    """Every closed gate of the base model by its key."""
    now = clock()
    rows = await session.scalars(
        select(AdapterGate)
        .where(AdapterGate.base_model == base_model, AdapterGate.mode.is_not(None), _unexpired(now))
        .execution_options(populate_existing=True)
    )
    return {row.run_id: _gate(row, now) for row in rows}


async def pause_gate(
    transaction: AsyncSession, key: str, *, tenant: TenantId | None, base_model: str, pause: Pause, clock: Clock
) -> Gate:
    """Close the gate, or take over one that is closed."""
    now = clock()
    await _make(transaction, {key: (tenant, base_model)}, now)
    row = await _locked(transaction, key)
    row.since = row.since if _gate(row, now).mode else now
    row.generation, row.mode, row.reason = row.generation + 1, pause.mode, pause.reason
    row.expires_at = None if pause.ttl is None else now + pause.ttl
    await transaction.flush()
    return _gate(row, now)


async def resume_gate(transaction: AsyncSession, key: str, *, generation: int | None, clock: Clock) -> Gate:
    """Open the gate; open already is fine. Raises ``InvalidRequest`` when ``generation`` is given and is not the gate's."""
    now = clock()
    found = await transaction.scalar(
        select(AdapterGate).where(AdapterGate.run_id == key).with_for_update().execution_options(populate_existing=True)
    )
    if found is None:
        return Gate()
    gate = _gate(found, now)
    if generation is not None and generation != gate.generation:
        raise InvalidRequest(
            f"generation is {generation}, but the gate is at {gate.generation}: another controller has changed it since"
        )
    if found.mode is not None:
        found.generation, found.mode, found.reason = found.generation + 1, None, None
        found.since, found.expires_at = now, None
        await transaction.flush()
    return _gate(found, now)


async def mark_in_flight(transaction: AsyncSession, dispatches: Sequence[Dispatch], clock: Clock) -> list[bool]:
    """Note which of the samples are in flight: those without a closed gate before them; says so for each, in order.

    Takes the place of a note that there is, also of one by a process that has lost the sample.
    """
    now = clock()
    keys: dict[str, tuple[TenantId | None, str]] = {}
    for dispatch in dispatches:
        keys[pool_gate(dispatch.base_model)] = (None, dispatch.base_model)
        if dispatch.run is not None:
            keys[dispatch.run] = (dispatch.tenant, dispatch.base_model)
    is_open = await _held(transaction, keys, now)
    if missing := {key: whose for key, whose in keys.items() if key not in is_open}:
        await _make(transaction, missing, now)
        is_open = await _held(transaction, keys, now)
    entering = {
        dispatch.operation: dispatch
        for dispatch in dispatches
        if is_open[pool_gate(dispatch.base_model)] and (dispatch.run is None or is_open[dispatch.run])
    }
    rows = [
        {
            "operation_id": dispatch.operation,
            "tenant_id": dispatch.tenant,
            "base_model": dispatch.base_model,
            "run_id": dispatch.run,
            "version": dispatch.version,
            "replica": dispatch.replica,
            "process": dispatch.process,
            "since": now,
        }
        for _, dispatch in sorted(entering.items())
    ]
    if rows:
        await transaction.execute(replacing_insert(transaction, SampleInFlight), rows)
    return [dispatch.operation in entering for dispatch in dispatches]


async def clear_in_flight(transaction: AsyncSession, operations: Sequence[RequestId], process: str) -> set[str]:
    """The samples are no longer in flight in that process; returns which of them were."""
    if not operations:
        return set()
    left = await transaction.scalars(_LEAVE, {"operations": few_lengths(operations), "process": process})
    return set(left)


async def update_in_flight(
    session: AsyncSession, operations: Sequence[RequestId], process: str, *, version: str | None, replica: str
) -> None:
    """The samples, in flight in that process, are drawn from ``version`` on ``replica`` now. A single statement."""
    keys = {"operations": few_lengths(operations), "of_process": process, "to_version": version, "to_replica": replica}
    await session.execute(_MOVE, keys)


async def clear_all_in_flight(transaction: AsyncSession, process: str) -> None:
    """Nothing is in flight in that process: it begins, or is dead."""
    await transaction.execute(delete(SampleInFlight).where(SampleInFlight.process == process))


async def in_flight(session: AsyncSession, key: str) -> int:
    """How many samples of a run, or of a whole base model, replicas work on now."""
    is_pool = key.startswith("pool:")
    where = SampleInFlight.base_model == key.removeprefix("pool:") if is_pool else SampleInFlight.run_id == key
    return await session.scalar(select(func.count()).select_from(SampleInFlight).where(where)) or 0


async def versions_in_flight(session: AsyncSession, run: RunId) -> dict[str, list[str]]:
    """Versions of the run that each replica works on now, by the replica's name."""
    rows = await session.execute(
        select(SampleInFlight.replica, SampleInFlight.version)
        .where(SampleInFlight.run_id == run, SampleInFlight.version.is_not(None))
        .distinct()
    )
    found: dict[str, list[str]] = {}
    for replica, version in rows:
        found.setdefault(replica, []).append(version or "")
    return found


async def open_expired(transaction: AsyncSession, clock: Clock) -> list[tuple[str, str]]:
    """Open every gate whose time is over; returns key and base model of each."""
    now = clock()
    # In the order in which dispatches hold them: neither can wait for the other in a circle.
    expired = (
        select(AdapterGate.run_id)
        .where(AdapterGate.mode.is_not(None), AdapterGate.expires_at <= now)
        .order_by(AdapterGate.run_id)
        .with_for_update()
    )
    rows = await transaction.execute(
        update(AdapterGate)
        .where(AdapterGate.run_id.in_(expired))
        .values(generation=AdapterGate.generation + 1, mode=None, reason=None, since=now, expires_at=None)
        .returning(AdapterGate.run_id, AdapterGate.base_model)
        .execution_options(synchronize_session=False)
    )
    return [(row.run_id, row.base_model) for row in rows]


async def _held(transaction: AsyncSession, keys: Collection[str], now: datetime) -> dict[str, bool]:
    """Whether each gate is open, by key; none of them changes before the transaction ends. Only those that have a row."""
    rows = await transaction.execute(_HELD, {"keys": few_lengths(list(keys))})
    return {row.run_id: row.mode is None or _is_over(row.expires_at, now) for row in rows}


async def _make(transaction: AsyncSession, keys: Mapping[str, tuple[TenantId | None, str]], now: datetime) -> None:
    """Gates by key, each with whose it is and its base model; those that are there stay."""
    rows = [
        {"run_id": key, "tenant_id": tenant, "base_model": base_model, "generation": 0, "since": now}
        for key, (tenant, base_model) in sorted(keys.items())
    ]
    await transaction.execute(insert_unless_present(transaction, AdapterGate).values(rows))


async def _locked(transaction: AsyncSession, key: str) -> AdapterGate:
    row = await transaction.scalar(
        select(AdapterGate).where(AdapterGate.run_id == key).with_for_update().execution_options(populate_existing=True)
    )
    if row is None:
        raise RuntimeError("a gate's row was made and is gone; rows are never deleted")
    return row


def _unexpired(now: datetime) -> ColumnElement[bool]:
    return or_(AdapterGate.expires_at.is_(None), AdapterGate.expires_at > now)


def _gate(row: AdapterGate, now: datetime) -> Gate:
    if row.mode is None or _is_over(row.expires_at, now):
        return Gate(generation=row.generation)
    return Gate(row.generation, GateMode(row.mode), row.reason, row.since, row.expires_at)


def _is_over(expires_at: datetime | None, now: datetime) -> bool:
    return expires_at is not None and expires_at <= now
