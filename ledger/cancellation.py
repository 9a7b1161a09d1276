"""Cancellation: ends pending operations from outside, whoever works on them.

A cancelled operation becomes a failed one in the caller's transaction. What follows from that:

- A run goes on with its next operation; no hole is left in its ``seq_id``.
- The run's fencing token grows. A trainer that has computed the operation already cannot record it: it forgets the adapter
  and rebuilds it from the ledger, without the operation.
- A sampling process stops drawing the sample, and records how many tokens it has drawn. Those of a sample between two
  processes are counted as they were saved.
- A run whose creation is cancelled has failed for good.

An unload is never cancelled: its key is used once in the life of a run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, Row, Table, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Cancelled, ClientSilent, RunUnloaded, WeftError
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind, known_kind
from ledger import statements as sql
from ledger.rows import error_columns
from ledger.settlement import Charged, count_cut, cut_row, settle_cancelled
from ledger.statements import operations, runs
from ledger.turns import advance
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import ApiKey, RunState, Sampler, Session
from tenants.forced_silence import were_answered
from tenants.sample_progress import saved_tokens
from tenants.webhook_events import tell_failed_run

_AT_ONCE = 500
"""Operations ended by one statement: bounds its parameters."""

_samplers = cast(Table, Sampler.__table__)
_sessions = cast(Table, Session.__table__)
_keys = cast(Table, ApiKey.__table__)


@dataclass(frozen=True, slots=True)
class OfOperation:
    """Selects one operation, of ``tenant`` if that is given."""

    operation: str
    tenant: TenantId | None = None


@dataclass(frozen=True, slots=True)
class OfLane:
    """Selects the operations of one lane: a run's or a sampler's id."""

    lane: str


@dataclass(frozen=True, slots=True)
class OfSession:
    """Selects the operations of every run and every sampler of a session."""

    session: str


@dataclass(frozen=True, slots=True)
class OfTenant:
    """Selects a tenant's operations."""

    tenant: str


@dataclass(frozen=True, slots=True)
class OfKeys:
    """Selects the operations that requests with API keys of one tenant have brought; ``keys`` are their numbers."""

    tenant: TenantId
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class OfEndedSessions:
    """Selects the operations of all sessions that have ended: a net for those accepted while their session ended."""


@dataclass(frozen=True, slots=True)
class OfSilentSessions:
    """Selects the operations of open sessions whose clients have sent heartbeats, and nothing since ``silent_since``."""

    silent_since: datetime


@dataclass(frozen=True, slots=True)
class OfEndedKeys:
    """Selects the operations of all API keys that have ended by ``now``: a net for those accepted while their key ended."""

    now: datetime


Selection = OfOperation | OfLane | OfSession | OfTenant | OfKeys | OfEndedSessions | OfSilentSessions | OfEndedKeys
"""Selects pending operations by one of their owners."""


def session_ended() -> Cancelled:
    """Return the error of an operation whose session ended before it was done."""
    return Cancelled("cancelled: the session of this request has ended")


def client_silent() -> ClientSilent:
    """Return the error of a sample whose client has sent no heartbeat for too long."""
    return ClientSilent("cancelled: the client of this request had sent no heartbeat for a while; send a new request")


@dataclass(frozen=True, slots=True)
class EndedOperation:
    """An operation that was pending and has been ended. ``trainer`` leases its run, if anybody does."""

    id: RequestId
    lane: str
    kind: OperationKind
    base_model: str
    trainer: str | None = None


_COLUMNS = (operations.c.id, operations.c.lane, operations.c.seq_id, operations.c.kind, operations.c.base_model)


async def end_samples(
    transaction: AsyncSession, selection: Selection, error: WeftError, now: datetime
) -> list[EndedOperation]:
    """Fail the pending samples of ``selection`` with ``error``, and return them."""
    # Sorted here: SQLite would read all operations in the order of their ids.
    query = select(*_COLUMNS).where(IS_PENDING, IS_SAMPLE, *_samples_of(selection))
    found = {row.id: row for row in await transaction.execute(query)}
    ended = await _fail(transaction, sorted(found), error, now)
    return [_ended(found[one]) for one in ended]


async def end_training(
    transaction: AsyncSession, selection: Selection, error: WeftError, now: datetime
) -> list[EndedOperation]:
    """Fail the pending training operations of ``selection`` with ``error``, advance their runs, and return them."""
    query = (
        select(*_COLUMNS)
        .join_from(operations, runs, runs.c.id == operations.c.lane)
        .where(
            IS_PENDING,
            IS_TRAINING,
            operations.c.seq_id >= runs.c.next_seq_id,
            operations.c.kind != OperationKind.UNLOAD_MODEL,
            *_training_of(selection),
        )
    )
    found = {row.id: row for row in await transaction.execute(query)}
    if not found:
        return []
    trainers: dict[str, str | None] = {}
    for lanes in _parts(sorted({row.lane for row in found.values()})):
        # Locked before the operations, as when operations are completed.
        locked = await transaction.execute(sql.LOCK_RUNS, {"lanes": lanes})
        trainers |= {row.id: row.trainer_id for row in locked}
    ended = await _fail(transaction, sorted(found), error, now)
    touched = {found[one].lane for one in ended}
    created = {found[one].lane for one in ended if found[one].seq_id == 0}
    consequence = RunUnloaded(f"the model was never made: {error.message}")
    orphaned = [one for run in sorted(created) for one in await _fail_run(transaction, RunId(run), consequence, now)]
    for lanes in _parts(sorted(touched)):
        fenced = update(runs).where(runs.c.id.in_(lanes)).values(lease_token=runs.c.lease_token + 1)
        await transaction.execute(fenced)
        await advance(transaction, lanes, now)
    return [*(_ended(found[one], trainers[found[one].lane]) for one in ended), *orphaned]


async def _fail(transaction: AsyncSession, ids: Sequence[str], error: WeftError, now: datetime) -> list[str]:
    """Fail those of the operations that are pending still, and return their ids. ``ids`` are sorted, as locks need it.

    None has used tokens: those of a sample count again once the sampling process says how many it has drawn. Of a sample that
    no process has, the saved ones count at once.
    """
    failed: list[str] = []
    ended: list[Charged] = []
    cut: list[dict[str, Any]] = []
    for some in _parts(ids):
        rows = (await transaction.execute(sql.STILL_PENDING, {"ids": some})).all()
        pending = [row.id for row in rows]
        if pending:
            failing = update(operations).where(operations.c.id.in_(pending))
            columns = {"state": OperationState.FAILED, "finished_at": now, "tokens": 0, **error_columns(error)}
            await transaction.execute(failing.values(**columns))
            await transaction.execute(sql.DROP_PAYLOADS, {"ids": pending})
            cut += await _saved(transaction, rows)
        failed += pending
        ended += rows
    # Rates are locked after all operations, as when operations are completed.
    if ended:
        await settle_cancelled(transaction, ended)
    if cut:
        await count_cut(transaction, cut, now)
    return failed


async def _saved(transaction: AsyncSession, rows: Sequence[Row[*tuple[Any, ...]]]) -> list[dict[str, Any]]:
    """Return the parameters of ``METER_CANCELLED`` of those samples between two sampling processes that have saved tokens."""
    prompts = {row.id: row.tokens for row in rows if row.kind == OperationKind.SAMPLE and row.taken_by is None}
    saved = await saved_tokens(transaction, prompts) if prompts else {}
    return [cut_row(operation, prompts[operation], *tokens) for operation, tokens in sorted(saved.items())]


async def _fail_run(transaction: AsyncSession, run: RunId, error: WeftError, now: datetime) -> list[EndedOperation]:
    """Mark a run as never made, and fail what waits in its lane."""
    failed = update(runs).where(runs.c.id == run, runs.c.state == RunState.CREATING).values(state=RunState.FAILED)
    tenant = await transaction.scalar(failed.returning(runs.c.tenant_id))
    if tenant is not None:
        await tell_failed_run(transaction, TenantId(tenant), run, error, now)
    waiting = select(*_COLUMNS).where(
        IS_PENDING, IS_TRAINING, operations.c.lane == run, operations.c.kind != OperationKind.UNLOAD_MODEL
    )
    found = {row.id: row for row in await transaction.execute(waiting)}
    return [_ended(found[one]) for one in await _fail(transaction, sorted(found), error, now)]


def _ended(row: Row[*tuple[Any, ...]], trainer: str | None = None) -> EndedOperation:
    return EndedOperation(RequestId(row.id), row.lane, known_kind(row.kind), row.base_model, trainer)


def _samples_of(selection: Selection) -> list[ColumnElement[bool]]:
    """Return the conditions on a pending sample. The tenant is named wherever it can be: the index begins with it."""
    match selection:
        case OfOperation(operation, tenant):
            named = operations.c.id == operation
            return [named] if tenant is None else [named, operations.c.tenant_id == tenant]
        case OfLane(lane):
            owner = select(_samplers.c.tenant_id).where(_samplers.c.id == lane).scalar_subquery()
            return [operations.c.tenant_id == owner, operations.c.lane == lane]
        case OfSession(session):
            owner = select(_sessions.c.tenant_id).where(_sessions.c.id == session).scalar_subquery()
            lanes = select(_samplers.c.id).where(_samplers.c.session_id == session)
            return [operations.c.tenant_id == owner, operations.c.lane.in_(lanes)]
        case OfTenant(tenant_id):
            return [operations.c.tenant_id == tenant_id]
        case OfKeys(tenant_id, keys):
            return [operations.c.tenant_id == tenant_id, operations.c.key_id.in_(keys)]
        case OfEndedSessions():
            ended = select(_samplers.c.id).join_from(_samplers, _sessions, _sessions.c.id == _samplers.c.session_id)
            return [ended.where(_samplers.c.id == operations.c.lane, _sessions.c.ended_at.is_not(None)).exists()]
        case OfSilentSessions(since):
            silent = select(_samplers.c.id).join_from(_samplers, _sessions, _sessions.c.id == _samplers.c.session_id)
            return [silent.where(_samplers.c.id == operations.c.lane, *_is_silent(since)).exists()]
        case OfEndedKeys(now):
            return [_is_of_ended_key(now)]


def _training_of(selection: Selection) -> list[ColumnElement[bool]]:
    """Return the conditions on a pending training operation, which is joined with its run."""
    match selection:
        case OfOperation(operation, tenant):
            named = operations.c.id == operation
            return [named] if tenant is None else [named, operations.c.tenant_id == tenant]
        case OfLane(lane):
            return [runs.c.id == lane]
        case OfSession(session):
            return [runs.c.session_id == session]
        case OfTenant(tenant_id):
            return [runs.c.tenant_id == tenant_id]
        case OfKeys(tenant_id, keys):
            return [runs.c.tenant_id == tenant_id, operations.c.key_id.in_(keys)]
        case OfEndedSessions():
            ended = select(_sessions.c.id).where(_sessions.c.id == runs.c.session_id, _sessions.c.ended_at.is_not(None))
            return [ended.exists()]
        case OfSilentSessions(since):
            return [select(_sessions.c.id).where(_sessions.c.id == runs.c.session_id, *_is_silent(since)).exists()]
        case OfEndedKeys(now):
            return [_is_of_ended_key(now)]


def _is_silent(since: datetime) -> list[ColumnElement[bool]]:
    """Return the conditions on a session and an operation of it, whose request was a sign of life itself.

    A client that has never sent a heartbeat is not expected to send one.
    """
    return [
        operations.c.created_at < since,
        _sessions.c.ended_at.is_(None),
        _sessions.c.heartbeat_at < since,
        _sessions.c.last_seen_at < since,
        were_answered(_sessions.c.tenant_id, since),
    ]


def _is_of_ended_key(now: datetime) -> ColumnElement[bool]:
    has_ended = or_(_keys.c.revoked_at.is_not(None), _keys.c.expires_at <= now)
    return select(_keys.c.id).where(_keys.c.id == operations.c.key_id, has_ended).exists()


def _parts(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for begin in range(0, len(ids), _AT_ONCE):
        yield ids[begin : begin + _AT_ONCE]
