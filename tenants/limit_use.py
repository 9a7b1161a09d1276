"""Use of a tenant's limits, counted from the rows that make it. What enforces a limit and what reports it count alike."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import BigInteger, ColumnElement, FromClause, Select, Table, bindparam, func, literal_column, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.batcher import few_lengths
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from store.tables import Checkpoint, Operation, Project, Run, SampleRecord, Session, Tenant, Webhook
from tenants.limits import Limits

_operations = cast(Table, Operation.__table__)
_runs = cast(Table, Run.__table__)
_sessions = cast(Table, Session.__table__)
_checkpoints = cast(Table, Checkpoint.__table__)
_records = cast(Table, SampleRecord.__table__)
_projects = cast(Table, Project.__table__)
_tenants = cast(Table, Tenant.__table__)
_webhooks = cast(Table, Webhook.__table__)

Column = ColumnElement[Any]
SNAPSHOT_BYTES = "snapshot_bytes"
"""Name of a use that is no limit of its own: the part of ``stored_bytes`` that no save is refused for."""
_NUMBER: ColumnElement[int] = func.count()


def sum_of(column: Any) -> ColumnElement[int]:
    """Return the sum of a column of whole numbers, 0 without rows."""
    # PostgreSQL adds bigints up to a decimal number.
    return sql_cast(func.coalesce(func.sum(column), 0), BigInteger)


def _of(owner: Column, counted: Column, table: FromClause, *where: Column) -> Column:
    """Return ``counted`` over the rows of ``owner``, a column of the query around it that names the tenant."""
    return select(counted).select_from(table).where(table.c.tenant_id == owner, *where).scalar_subquery()


def training_use(owner: Column) -> dict[str, Column]:
    """Return the use of the limits of pending training, by name, as columns of a query in which ``owner`` is the tenant."""
    return {
        "pending_operations": _of(owner, _NUMBER, _operations, IS_PENDING, IS_TRAINING),
        "pending_bytes": _of(owner, sum_of(_operations.c.payload_bytes), _operations, IS_PENDING, IS_TRAINING),
    }


def _sample_use(owner: Column) -> dict[str, Column]:
    return {
        "pending_samples": _of(owner, _NUMBER, _operations, IS_PENDING, IS_SAMPLE),
        "sample_tokens": _of(owner, sum_of(_operations.c.reserved_tokens), _operations, IS_PENDING, IS_SAMPLE),
    }


LIMITED_PROJECTS = "limited_projects"
"""Name of a use that is no limit: the tenant's projects that have limits of their own."""


def _limited_projects(owner: Column) -> dict[str, Column]:
    return {LIMITED_PROJECTS: _of(owner, _NUMBER, _projects, _projects.c.limits.is_not(None))}


def _record_use(owner: Column) -> dict[str, Column]:
    # Rows of a version before have no size, and go within a day.
    return {"sample_record_bytes": _of(owner, sum_of(_records.c.size_bytes), _records)}


def _session_use(owner: Column) -> dict[str, Column]:
    return {"sessions": _of(owner, _NUMBER, _sessions, _sessions.c.ended_at.is_(None))}


def _run_use(owner: Column) -> dict[str, Column]:
    session_is_open = (
        select(_sessions.c.id).where(_sessions.c.id == _runs.c.session_id, _sessions.c.ended_at.is_(None)).exists()
    )
    # A literal, as in the partial index.
    return {"open_runs": _of(owner, _NUMBER, _runs, _runs.c.state == literal_column("'ready'"), session_is_open)}


def _snapshot_bytes(owner: Column) -> Column:
    return _of(owner, sum_of(_runs.c.snapshot_bytes), _runs, _runs.c.snapshot_dir.is_not(None))


def _storage_use(owner: Column) -> dict[str, Column]:
    return {
        "stored_bytes": _of(owner, sum_of(_checkpoints.c.size_bytes), _checkpoints) + _snapshot_bytes(owner),
        "checkpoints": _of(owner, _NUMBER, _checkpoints),
    }


def _webhook_use(owner: Column) -> dict[str, Column]:
    return {"webhooks": _of(owner, _NUMBER, _webhooks)}


@dataclass(frozen=True, slots=True)
class Use:
    """A tenant's limits, and how much of each is used, by name. Only what was asked for is counted."""

    limits: Limits
    used: dict[str, int]

    def room(self, name: str) -> int:
        """Return how much more of ``name`` the tenant may use; below 0 after the limit was lowered."""
        return self.limits.by_name()[name] - self.used[name]

    @property
    def may_open_run(self) -> bool:
        """True if one more model may be made: not too many are open, and snapshots alone do not fill the storage."""
        return self.room("open_runs") >= 1 and self.used[SNAPSHOT_BYTES] < self.limits.stored_bytes


class UseQuery:
    """A query that counts some of the use of tenants. Built once: it is read with every batch of samples."""

    def __init__(self, *parts: dict[str, Column]) -> None:
        columns = {name: column for part in parts for name, column in part.items()}
        self._names = tuple(columns)
        labelled = [column.label(f"used_{name}") for name, column in columns.items()]
        self._query: Select[Any] = select(_tenants.c.id, _tenants.c.limits, *labelled).where(
            _tenants.c.id.in_(bindparam("tenants", expanding=True))
        )

    async def read(self, session: AsyncSession, tenants: Collection[TenantId], defaults: Limits) -> dict[TenantId, Use]:
        """Return the use of each of ``tenants``, in one statement."""
        rows = await session.execute(self._query, {"tenants": few_lengths(sorted(tenants))})
        return {
            TenantId(row.id): Use(
                defaults.with_own(row.limits), {name: getattr(row, f"used_{name}") for name in self._names}
            )
            for row in rows
        }

    async def of(self, session: AsyncSession, tenant: TenantId, defaults: Limits) -> Use:
        """Return the use of one tenant."""
        return (await self.read(session, [tenant], defaults))[tenant]


_owner = _tenants.c.id
TRAINING_USE = UseQuery(training_use(_owner))
SAMPLE_USE = UseQuery(_sample_use(_owner), _limited_projects(_owner))
SESSION_USE = UseQuery(_session_use(_owner))
RUN_USE = UseQuery(_run_use(_owner), {SNAPSHOT_BYTES: _snapshot_bytes(_owner)}, _limited_projects(_owner))
STORAGE_USE = UseQuery(_storage_use(_owner))
WEBHOOK_USE = UseQuery(_webhook_use(_owner))
ALL_USE = UseQuery(
    training_use(_owner),
    _sample_use(_owner),
    _record_use(_owner),
    _session_use(_owner),
    _run_use(_owner),
    _storage_use(_owner),
    _webhook_use(_owner),
)
