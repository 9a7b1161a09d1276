"""Gates: a closed gate keeps new samples of an adapter, or of a whole base model, from starting.

Every process shares the gates through the database. A gate is open, or closed in one of three modes until it is resumed or
expires. A second pause replaces mode, reason and expiry. ``generation`` grows with every change, so a controller that names
its generation resumes only its own pause.

A sample runs only while its row is in ``samples_in_flight``. The row is written by a transaction that holds a lock on the
open gate. Once a pause has committed, therefore, no new row can appear, and a drain waits only for the rows already there.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import cast

from sqlalchemy import ColumnElement, Row, Table, bindparam, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from contracts.ids import RequestId, RunId, TenantId
from contracts.stored_words import known
from store.batcher import few_lengths
from store.clock import Clock
from store.inserts import insert_unless_present, replacing_insert
from store.settings import Settings
from store.tables import AdapterGate, SampleInFlight


class GateMode(StrEnum):
    """Effect of a pause on samples in flight. New samples wait in every mode.

    - ``abort``: samples end with the tokens drawn so far.
    - ``wait``: samples run to their end.
    - ``keep``: samples are cut, and continue after the resume.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Gate:
    """State of a gate. ``mode`` None means open."""

    generation: int = 0
    mode: GateMode | None = None
    reason: str | None = None
    since: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A sample about to be sent to a replica. ``run`` None samples the bare base."""

    operation: RequestId
    tenant: TenantId
    base_model: str
    run: RunId | None
    version: str | None
    replica: str
    process: str

    @property
    def gates(self) -> tuple[str, ...]:
        """Keys of the gates before the sample."""
        return (pool_gate(self.base_model),) if self.run is None else (pool_gate(self.base_model), self.run)


class Entry(StrEnum):
    """Answer to a sample that is to enter its gates.

    - ``in_flight``: its gates are open, and it is recorded as in flight.
    - ``closed``: one of them is closed.
    - ``locked``: another transaction changes one of them. It is not waited for: the lock may be another tenant's.
    - ``missing``: one of them has no row yet (``make_gates``).
    """

    IN_FLIGHT = "in_flight"
    CLOSED = "closed"
    LOCKED = "locked"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Entered:
    """A sample's entry. ``cache_clears`` grows whenever a pause of one of its gates clears the cache."""

    entry: Entry
    cache_clears: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """A controller's request to close a gate. Every pause ends: by itself after ``ttl``, if nobody resumes before.

    ``clear_cache``: what replicas have cached of prompts behind the gate is not read again. ``generation``: the gate is closed
    only if this is its generation; None: whatever it is.
    """

    mode: GateMode
    reason: str | None = None
    ttl: timedelta = timedelta(hours=1)
    clear_cache: bool = False
    generation: int | None = None


_LOCK = (
    select(AdapterGate.run_id, AdapterGate.mode, AdapterGate.expires_at, AdapterGate.cache_clears)
    .where(AdapterGate.run_id.in_(bindparam("keys", expanding=True)))
    .order_by(AdapterGate.run_id)
    .with_for_update(read=True, skip_locked=True)
)
_PRESENT = select(AdapterGate.run_id).where(AdapterGate.run_id.in_(bindparam("keys", expanding=True)))
_CLEAR = (
    delete(SampleInFlight)
    .where(
        SampleInFlight.operation_id.in_(bindparam("operations", expanding=True)),
        SampleInFlight.process == bindparam("process"),
    )
    .returning(SampleInFlight.operation_id)
    .execution_options(synchronize_session=False)
)
# Skips locked rows without waiting: the transaction that holds the lock is about to delete or to replace the row.
_UPDATE = (
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


def pause_ttl(seconds: float | None, settings: Settings) -> timedelta:
    """Return how long a pause lasts that asks for ``seconds``; None asks for the default.

    Raises ``InvalidRequest`` for more than the longest.
    """
    longest = settings.longest_pause
    if seconds is None:
        return min(settings.pause_ttl, longest)
    if not 0 < seconds <= longest.total_seconds():
        raise InvalidRequest(
            f"ttl_seconds must be above 0 and at most {longest.total_seconds():.0f} here; pause again to go on longer"
        )
    return timedelta(seconds=seconds)


def pool_gate(base_model: str) -> str:
    """Return the key of the gate for all samples of a base model."""
    return f"pool:{base_model}"


async def gate_of(session: AsyncSession, key: str, clock: Clock) -> Gate:
    """Return the gate of a run or of a base model. A gate without a row is open."""
    row = await session.get(AdapterGate, key, populate_existing=True)
    return Gate() if row is None else _gate(row, clock())


async def gates_of(session: AsyncSession, keys: Sequence[str], clock: Clock) -> dict[str, Gate]:
    """Return the gates of these runs or base models by their keys, without those that have no row and so are open."""
    now = clock()
    rows = await session.scalars(
        select(AdapterGate).where(AdapterGate.run_id.in_(few_lengths(keys))).execution_options(populate_existing=True)
    )
    return {row.run_id: _gate(row, now) for row in rows}


async def closed_gates(session: AsyncSession, base_model: str, clock: Clock) -> dict[str, Gate]:
    """Return every closed gate of the base model by its key."""
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
    """Close the gate. On a closed gate, replace mode, reason and expiry.

    Raises ``InvalidRequest`` when the pause names a generation that is not the gate's.
    """
    now = clock()
    await _insert_missing(transaction, {key: (tenant, base_model)}, now)
    row = await _locked(transaction, key)
    _check_generation(pause.generation, row.generation)
    row.since = row.since if _gate(row, now).mode else now
    row.generation, row.mode, row.reason = row.generation + 1, pause.mode, pause.reason
    row.expires_at = now + pause.ttl
    row.cache_clears += pause.clear_cache
    await transaction.flush()
    return _gate(row, now)


async def resume_gate(transaction: AsyncSession, key: str, *, generation: int | None, clock: Clock) -> Gate:
    """Open the gate, if it is closed. Raises ``InvalidRequest`` when ``generation`` is given and is not the gate's."""
    now = clock()
    found = await transaction.scalar(
        select(AdapterGate).where(AdapterGate.run_id == key).with_for_update().execution_options(populate_existing=True)
    )
    if found is None:
        return Gate()
    gate = _gate(found, now)
    _check_generation(generation, gate.generation)
    if found.mode is not None:
        found.generation, found.mode, found.reason = found.generation + 1, None, None
        found.since, found.expires_at = now, None
        await transaction.flush()
    return _gate(found, now)


def _check_generation(asked: int | None, found: int) -> None:
    if asked is not None and asked != found:
        raise InvalidRequest(
            f"generation is {asked}, but the gate is at {found}: another controller has changed it since"
        )


async def mark_in_flight(transaction: AsyncSession, dispatches: Sequence[Dispatch], clock: Clock) -> list[Entered]:
    """Record as in flight each sample whose gates are open, and return each dispatch's entry, in order. Waits for no gate.

    An existing row of the sample is replaced, including the row of a process that held the sample before.
    """
    now = clock()
    keys = {key for dispatch in dispatches for key in dispatch.gates}
    gates = await _lock(transaction, sorted(keys))
    is_open = {key: row.mode is None or _is_over(row.expires_at, now) for key, row in gates.items()}
    present: set[str] = set()
    if unlocked := sorted(keys - is_open.keys()):
        present = set((await transaction.scalars(_PRESENT, {"keys": few_lengths(unlocked)})).all())

    def entry(dispatch: Dispatch) -> Entry:
        if all(is_open.get(key, False) for key in dispatch.gates):
            return Entry.IN_FLIGHT
        if any(key in is_open and not is_open[key] for key in dispatch.gates):
            return Entry.CLOSED
        return Entry.LOCKED if any(key in present for key in dispatch.gates) else Entry.MISSING

    entries = [entry(dispatch) for dispatch in dispatches]
    recorded = {
        dispatch.operation: dispatch
        for dispatch, found in zip(dispatches, entries, strict=True)
        if found is Entry.IN_FLIGHT
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
        for _, dispatch in sorted(recorded.items())
    ]
    if rows:
        await transaction.execute(replacing_insert(transaction, SampleInFlight), rows)
    clears = [sum(gates[key].cache_clears for key in one.gates if key in gates) for one in dispatches]
    return [Entered(*one) for one in zip(entries, clears, strict=True)]


async def make_gates(transaction: AsyncSession, dispatch: Dispatch, clock: Clock) -> None:
    """Insert the open gates of the sample that have no row yet. Waits for a transaction that is inserting one of them."""
    keys: dict[str, tuple[TenantId | None, str]] = {pool_gate(dispatch.base_model): (None, dispatch.base_model)}
    if dispatch.run is not None:
        keys[dispatch.run] = (dispatch.tenant, dispatch.base_model)
    await _insert_missing(transaction, keys, clock())


async def clear_in_flight(transaction: AsyncSession, operations: Sequence[RequestId], process: str) -> set[str]:
    """Delete the process's in-flight rows of the samples. Return the samples that had one."""
    if not operations:
        return set()
    cleared = await transaction.scalars(_CLEAR, {"operations": few_lengths(operations), "process": process})
    return set(cleared)


async def update_in_flight(
    session: AsyncSession, operations: Sequence[RequestId], process: str, *, version: str | None, replica: str
) -> None:
    """Set version and replica of the process's in-flight samples, in a single statement."""
    keys = {"operations": few_lengths(operations), "of_process": process, "to_version": version, "to_replica": replica}
    await session.execute(_UPDATE, keys)


async def clear_all_in_flight(transaction: AsyncSession, process: str) -> None:
    """Delete every in-flight row of a process that starts now or is dead."""
    await transaction.execute(delete(SampleInFlight).where(SampleInFlight.process == process))


async def samples_in_flight_of(session: AsyncSession, processes: Sequence[str]) -> list[str]:
    """Return the samples that ``processes`` have in flight."""
    return list(await session.scalars(select(SampleInFlight.operation_id).where(SampleInFlight.process.in_(processes))))


async def in_flight(session: AsyncSession, key: str) -> int:
    """Return how many samples of a run, or of a whole base model, are in flight."""
    is_pool = key.startswith("pool:")
    where = SampleInFlight.base_model == key.removeprefix("pool:") if is_pool else SampleInFlight.run_id == key
    return await session.scalar(select(func.count()).select_from(SampleInFlight).where(where)) or 0


@dataclass(frozen=True, slots=True)
class Flight:
    """Samples of a run that one replica draws from one of its versions now; ``version`` None: not noted yet."""

    run: RunId
    replica: str
    version: str | None
    samples: int


async def flights_of(session: AsyncSession, runs: Sequence[str]) -> list[Flight]:
    """Return the samples of the runs that are in flight, by run, replica and version."""
    by = (SampleInFlight.run_id, SampleInFlight.replica, SampleInFlight.version)
    rows = await session.execute(
        select(*by, func.count()).where(SampleInFlight.run_id.in_(few_lengths(runs))).group_by(*by).order_by(*by)
    )
    return [Flight(RunId(run or ""), replica, version, samples) for run, replica, version, samples in rows]


async def open_expired(transaction: AsyncSession, clock: Clock) -> list[tuple[str, str]]:
    """Open every expired gate. Return key and base model of each."""
    now = clock()
    # Locked in the same order as dispatches lock them, which prevents deadlocks.
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


async def _lock(
    transaction: AsyncSession, keys: Collection[str]
) -> Mapping[str, Row[str, str | None, datetime | None, int]]:
    """Lock the gates that have a row until the transaction ends, and return the rows by their keys."""
    rows = await transaction.execute(_LOCK, {"keys": few_lengths(list(keys))})
    return {row.run_id: row for row in rows}


async def _insert_missing(
    transaction: AsyncSession, keys: Mapping[str, tuple[TenantId | None, str]], now: datetime
) -> None:
    """Insert missing gate rows. ``keys`` maps each key to its tenant and base model."""
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
    # A mode that only another version knows still closes the gate.
    mode = known(GateMode, row.mode, GateMode.WAIT)
    return Gate(row.generation, mode, row.reason, row.since, row.expires_at)


def _is_over(expires_at: datetime | None, now: datetime) -> bool:
    return expires_at is not None and expires_at <= now
