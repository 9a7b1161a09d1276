"""Usage of a tenant by hour, told apart by project, session, run, key, base model and kind of operation.

Operations that are not pruned yet are read from their own rows, so what has been answered is in the next look. The rules:
a failed operation's tokens count only if it is a sample that was cancelled, or that its tenant has made fail, after some; a
replay ends no operation, so it counts nothing; a prompt counts once for each request, not for each of its sequences.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cache
from typing import Any, cast

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    String,
    Subquery,
    Table,
    case,
    func,
    literal,
    literal_column,
    null,
    select,
    tuple_,
    type_coerce,
    union_all,
    update,
)
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from store.deletions import delete_some
from store.tables import Operation, Session, StorageHour, UsageHour
from store.tables.base import UtcDateTime
from tenants.metered_operations import SUMS, sums_of_ended
from tenants.reach import Owner, Reach, default_project, tenant_of

_hours = cast(Table, UsageHour.__table__)
_AT_ONCE = 500
"""Lines that are made in one turn of the event loop."""


class Dimension(StrEnum):
    """Property by which usage is told apart."""

    PROJECT = "project"
    SESSION = "session"
    RUN = "run"
    KEY = "key"
    BASE_MODEL = "base_model"
    KIND = "kind"


class BucketWidth(StrEnum):
    """Length of a line's time, in UTC."""

    HOUR = "1h"
    DAY = "1d"


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Usage within the bucket that begins at ``start``. A property that was not asked for is None.

    ``run`` is None for samples too, and ``key`` where no key is known.
    """

    start: datetime
    project: str | None
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    operations: int
    failed: int
    train_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int


def recounted(since: datetime, before: datetime) -> Select[Any]:
    """Return a query for the sums of each tenant's pruned operations that ended in that time: what was rolled up of it."""
    return (
        select(Operation.tenant_id, *sums_of_ended())
        .where(Operation.finished_at >= since, Operation.finished_at < before, Operation.pruned_at.is_not(None))
        .group_by(Operation.tenant_id)
    )


async def add_hours(transaction: AsyncSession, ended: Sequence[Row[*tuple[Any, ...]]]) -> None:
    """Add ended operations, rows with the columns that ``tenants.usage`` reads, to the usage of their hours."""
    found: dict[tuple[object, ...], list[int]] = {}
    for row in ended:
        is_sample = row.kind == OperationKind.SAMPLE
        hour = row.finished_at.replace(minute=0, second=0, microsecond=0)
        run = "" if is_sample else row.lane
        key = (row.tenant_id, hour, row.lane.split(":", 1)[0], run, row.key_id or 0, row.base_model, row.kind)
        sums = found.setdefault(key, [0] * len(SUMS))
        sums[0] += row.state == OperationState.DONE
        sums[1] += row.state != OperationState.DONE
        if not row.is_metered:
            continue
        if is_sample:
            sums[3] += row.tokens - row.sampled_tokens
            sums[4] += row.cached_tokens
            sums[5] += row.sampled_tokens
        else:
            sums[2] += row.tokens
    names = [column.name for column in _hours.primary_key.columns]
    # Sorted, so that two transactions lock the rows in the same order and cannot deadlock.
    rows = [
        dict(zip(names, key, strict=True)) | dict(zip(SUMS, sums, strict=True))
        for key, sums in sorted(found.items(), key=lambda item: tuple(map(str, item[0])))
    ]
    if rows:
        await transaction.execute(_adding_insert(transaction.get_bind().dialect.name), rows)


class UsageRows:
    """Rows of an owner's usage, rolled up and not, in the hours that begin from ``since`` on and before ``before``."""

    def __init__(self, dialect: str, owner: Owner, *, since: datetime, before: datetime) -> None:
        tenant, self._rules = tenant_of(owner), _RULES[dialect]
        since, before = next_hour(since), next_hour(before)
        both = _both([tenant], since, before, self._rules)
        project = func.coalesce(_project_of(both), default_project(tenant))
        self._both = both
        self._joined = both.outerjoin(Session, Session.id == both.c.session_id)
        self._where = [project.in_(sorted(owner.projects))] if isinstance(owner, Reach) else []
        self._dimensions: dict[Dimension, ColumnElement[Any]] = {
            Dimension.PROJECT: project,
            Dimension.SESSION: both.c.session_id,
            Dimension.RUN: both.c.run_id,
            Dimension.KEY: both.c.key_id,
            Dimension.BASE_MODEL: both.c.base_model,
            Dimension.KIND: both.c.kind,
        }

    def start(self, width: BucketWidth) -> ColumnElement[Any]:
        """Return the column of the bucket in which a row's hour is."""
        hour: ColumnElement[Any] = self._both.c.hour
        return hour if width is BucketWidth.HOUR else self._rules.day(hour)

    def dimension(self, one: Dimension) -> ColumnElement[Any]:
        """Return the column of that property. It is never null."""
        return self._dimensions[one]

    def sum(self, name: str) -> ColumnElement[Any]:
        """Return the sum of one of ``SUMS``."""
        return func.sum(self._both.c[name]).label(name)

    def is_after(self, line: UsageLine, by: Collection[Dimension], width: BucketWidth) -> ColumnElement[bool]:
        """Return the condition that a row belongs to a line behind this one."""
        keys = self.keys(by, width)
        return tuple_(*keys) > place_of(keys, line, by)

    def keys(self, by: Collection[Dimension], width: BucketWidth) -> list[ColumnElement[Any]]:
        """Return the columns by which rows are joined to lines, in the lines' order."""
        return [self.start(width), *(self.dimension(one) for one in Dimension if one in by)]

    def query(self, *columns: ColumnElement[Any]) -> Select[Any]:
        """Return a query for ``columns`` of the rows."""
        return select(*columns).select_from(self._joined).where(*self._where)


def key_of(line: UsageLine, by: Collection[Dimension]) -> tuple[object, ...]:
    """Return the values that the rows of a line have in ``UsageRows.keys``."""
    # Rows have no nulls: a sample's run is empty, and an unknown key is 0.
    absent = {Dimension.RUN: "", Dimension.KEY: 0}
    values = ((one, getattr(line, one.value)) for one in Dimension if one in by)
    return (line.start, *(absent.get(one) if value is None else value for one, value in values))


def place_of(keys: Sequence[ColumnElement[Any]], line: UsageLine, by: Collection[Dimension]) -> ColumnElement[Any]:
    """Return the place of a line in the order of ``keys``."""
    values = zip(keys, key_of(line, by), strict=True)
    return tuple_(*(literal(value, column.type) for column, value in values))


async def usage_lines(
    session: AsyncSession,
    owner: Owner,
    *,
    since: datetime,
    before: datetime,
    by: Collection[Dimension],
    width: BucketWidth = BucketWidth.HOUR,
    limit: int,
    offset: int = 0,
    after: UsageLine | None = None,
) -> list[UsageLine]:
    """Return the owner's usage of the hours that begin from ``since`` on and before ``before``, in order of time.

    ``after`` is the last line of the page before, of the same arguments.
    """
    since = since if after is None else max(since, after.start)
    rows = UsageRows(session.get_bind().dialect.name, owner, since=since, before=before)
    columns = [rows.start(width).label("start")]
    columns += [(rows.dimension(one) if one in by else null()).label(one.value) for one in Dimension]
    groups: list[ColumnElement[Any]] = [
        literal_column("1"),
        *(literal_column(str(place + 2)) for place, one in enumerate(Dimension) if one in by),
    ]
    query = (
        rows.query(*columns, *(rows.sum(name) for name in SUMS))
        .where(*([] if after is None else [rows.is_after(after, by, width)]))
        .group_by(*groups)
        .order_by(*groups)
        .limit(limit)
        .offset(offset)
    )
    rows_found = (await session.execute(query)).all()
    lines: list[UsageLine] = []
    for begin in range(0, len(rows_found), _AT_ONCE):
        lines += map(_line, rows_found[begin : begin + _AT_ONCE])
        # Others have their turn: ten thousand lines take a tenth of a second.
        await asyncio.sleep(0)
    return lines


async def count_usage_lines(
    session: AsyncSession, owner: Owner, *, since: datetime, before: datetime, by: Collection[Dimension], most: int
) -> int:
    """Return how many lines ``usage_lines`` has by hour, ``most`` if it has more."""
    rows = UsageRows(session.get_bind().dialect.name, owner, since=since, before=before)
    keys = rows.keys(by, BucketWidth.HOUR)
    lines = rows.query(*(key.label(f"key_{place}") for place, key in enumerate(keys))).distinct().limit(most)
    return await session.scalar(select(func.count()).select_from(lines.subquery())) or 0


async def usage_of_tenants(
    session: AsyncSession, tenants: Collection[TenantId], *, since: datetime, before: datetime
) -> dict[TenantId, list[UsageLine]]:
    """Return usage by hour, project, key and base model, of those tenants that have some; with one statement."""
    rules = _RULES[session.get_bind().dialect.name]
    both = _both(tenants, next_hour(since), next_hour(before), rules)
    columns = [
        both.c.tenant_id,
        both.c.hour.label("start"),
        _project_of(both).label("project"),
        both.c.key_id.label("key"),
        both.c.base_model,
    ]
    absent = [null().label(one.value) for one in (Dimension.SESSION, Dimension.RUN, Dimension.KIND)]
    query = (
        select(*columns, *absent, *(func.sum(both.c[name]).label(name) for name in SUMS))
        .select_from(both.outerjoin(Session, Session.id == both.c.session_id))
        .group_by(*(literal_column(str(place + 1)) for place in range(len(columns))))
    )
    found: dict[TenantId, list[UsageLine]] = {}
    for row in await session.execute(query):
        tenant = TenantId(row.tenant_id)
        line = _line(row)
        found.setdefault(tenant, []).append(replace(line, project=line.project or default_project(tenant)))
    return found


def _line(row: Row[*tuple[Any, ...]]) -> UsageLine:
    return UsageLine(
        start=row.start,
        project=row.project,
        session=row.session,
        run=row.run or None,
        key=row.key or None,
        base_model=row.base_model,
        kind=row.kind,
        **{name: int(getattr(row, name)) for name in SUMS},
    )


async def forget_usage(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` rows of usage, and as many of storage, of hours before ``before``; return how many at most."""
    usage = await delete_some(transaction, UsageHour, UsageHour.hour < before, most=most, first=UsageHour.hour)
    storage = await delete_some(transaction, StorageHour, StorageHour.hour < before, most=most, first=StorageHour.hour)
    return max(usage, storage)


async def keep_projects(transaction: AsyncSession, sessions: Select[str]) -> None:
    """Note the projects of sessions that are about to be forgotten with their usage. ``sessions`` selects their ids."""
    project = select(Session.project).where(Session.id == UsageHour.session_id).scalar_subquery()
    await transaction.execute(
        update(UsageHour)
        .where(UsageHour.session_id.in_(sessions))
        .values(project=project)
        .execution_options(synchronize_session=False)
    )


# --- statements ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TimeRules:
    """Expressions that each database spells in its own way."""

    is_sqlite: bool

    def hour(self, time: ColumnElement[Any]) -> ColumnElement[Any]:
        return self._floor(time, "hour", "%Y-%m-%d %H:00:00.000000")

    def day(self, time: ColumnElement[Any]) -> ColumnElement[Any]:
        return self._floor(time, "day", "%Y-%m-%d 00:00:00.000000")

    def session(self, lane: ColumnElement[str]) -> ColumnElement[str]:
        """Return the beginning of a lane, which is its session."""
        if self.is_sqlite:
            return func.substr(lane, 1, func.instr(lane + ":", ":") - 1, type_=String)
        return func.split_part(lane, ":", 1, type_=String)

    def _floor(self, time: ColumnElement[Any], unit: str, pattern: str) -> ColumnElement[Any]:
        floor = func.strftime(pattern, time) if self.is_sqlite else func.date_trunc(unit, time, "UTC")
        return type_coerce(floor, UtcDateTime())


_RULES = {"sqlite": _TimeRules(is_sqlite=True), "postgresql": _TimeRules(is_sqlite=False)}


def _both(tenants: Collection[TenantId], since: datetime, before: datetime, rules: _TimeRules) -> Subquery:
    """Return the tenants' usage in these hours, rolled up and not."""
    return union_all(_rolled(tenants, since, before), _unrolled(tenants, since, before, rules)).subquery()


def _project_of(both: Subquery) -> ColumnElement[Any]:
    """Return the project of a row that is joined with its session: the session's own, or the one noted when that was forgotten.

    Null is the default project.
    """
    return case((Session.id.is_not(None), Session.project), else_=both.c.project)


def _is_of(column: ColumnElement[Any], tenants: Collection[TenantId]) -> ColumnElement[bool]:
    return column.in_(tenants) if len(tenants) > 1 else column == next(iter(tenants))


def _rolled(tenants: Collection[TenantId], since: datetime, before: datetime) -> Select[Any]:
    return select(_hours).where(_is_of(_hours.c.tenant_id, tenants), _hours.c.hour >= since, _hours.c.hour < before)


def _unrolled(tenants: Collection[TenantId], since: datetime, before: datetime, rules: _TimeRules) -> Select[Any]:
    """Return the usage of operations that have ended and are not pruned, in the columns of ``_rolled``."""
    hour = rules.hour(Operation.finished_at.expression).label("hour")
    run = case((Operation.kind == OperationKind.SAMPLE, ""), else_=Operation.lane).label("run_id")
    session = rules.session(Operation.lane.expression).label("session_id")
    key = func.coalesce(Operation.key_id, 0).label("key_id")
    dimensions = (Operation.tenant_id, hour, session, run, key, Operation.base_model, Operation.kind)
    return (
        select(*dimensions, type_coerce(null(), String).label("project"), *sums_of_ended())
        .where(
            _is_of(Operation.tenant_id.expression, tenants),
            Operation.finished_at >= since,
            Operation.finished_at < before,
            Operation.finished_at.is_not(None),
            Operation.pruned_at.is_(None),
        )
        .group_by(*(literal_column(str(place + 1)) for place in range(len(dimensions))))
    )


def next_hour(time: datetime) -> datetime:
    """Return the beginning of the first hour that does not begin before ``time``."""
    floor = time.replace(minute=0, second=0, microsecond=0)
    return time if floor == time or time.year == datetime.max.year else floor + timedelta(hours=1)


@cache
def _adding_insert(dialect: str) -> SqliteInsert | PostgresInsert:
    insert = sqlite_insert(_hours) if dialect == "sqlite" else postgres_insert(_hours)
    return insert.on_conflict_do_update(
        index_elements=list(_hours.primary_key.columns),
        set_={name: _hours.c[name] + insert.excluded[name] for name in SUMS},
    )
