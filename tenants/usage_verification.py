"""Verification of usage: what was added up is counted again from the operations that it was added up from."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Tenant, UsageDay, UsageHour
from tenants.metered_operations import SUMS
from tenants.usage_hours import next_hour, recounted

_OF_DAYS = ("operations", "tokens")
_HOURS, _COUNTED, _WHOLE, _DAYS = "hours", "counted", "whole day", "days"
Sums = dict[str, int]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A sum of a tenant that differs. ``table`` holds ``told``; ``counted`` is what the finer rows come to."""

    tenant: str
    table: str
    name: str
    told: int
    counted: int


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome for one day (UTC).

    - ``since``: first hour whose operations are all kept, from which on hours were counted again; the day's end if none are.
    - ``operations``: number of operations that were counted again.
    - ``has_all_hours``: no hour of the day has expired, so that the day's own sums were compared with its hours'.
    """

    day: date
    since: datetime
    tenants: int
    operations: int
    has_all_hours: bool
    mismatches: list[Mismatch]


async def verify_day(session: AsyncSession, day: date, *, kept_since: datetime, hours_since: datetime) -> Verification:
    """Count the usage of ``day`` again, for every tenant: days from hours, and hours from the operations that are kept.

    - ``kept_since``: operations that ended later have not been forgotten.
    - ``hours_since``: hours that began later have not expired. A day that began before is not compared with its hours.
    """
    begin = datetime.combine(day, time(), UTC)
    end = begin + timedelta(days=1)
    since = min(max(begin, next_hour(max(kept_since, hours_since))), end)
    has_all_hours = begin >= hours_since
    # One statement sees one state: what is pruned meanwhile is on both sides or on none.
    parts = {
        _HOURS: _rolled(since, end),
        _COUNTED: recounted(since, end),
        _WHOLE: _rolled(begin, end),
        _DAYS: _days(day),
    }
    query = union_all(*(_named(name, part) for name, part in parts.items())).subquery()
    found: dict[str, dict[str, Sums]] = {name: {} for name in parts}
    for row in await session.execute(select(Tenant.name, query).outerjoin(Tenant, Tenant.id == query.c.tenant_id)):
        found[row.part][row.name or row.tenant_id] = {name: int(getattr(row, name)) for name in SUMS}
    whole = {tenant: _as_day(sums) for tenant, sums in found[_WHOLE].items()}
    days = {tenant: _as_day(sums) for tenant, sums in found[_DAYS].items()}
    return Verification(
        day=day,
        since=since,
        tenants=len({tenant for part in found.values() for tenant in part}),
        operations=sum(sums["operations"] + sums["failed"] for sums in found[_COUNTED].values()),
        has_all_hours=has_all_hours,
        mismatches=_differences("usage_hours", found[_HOURS], found[_COUNTED], SUMS)
        + (_differences("usage_days", days, whole, _OF_DAYS) if has_all_hours else []),
    )


def _named(part: str, query: Select[Any]) -> Select[Any]:
    rows = query.subquery()
    return select(literal(part).label("part"), *rows.columns)


def _rolled(since: datetime, before: datetime) -> Select[Any]:
    sums: list[ColumnElement[Any]] = [func.sum(getattr(UsageHour, name)).label(name) for name in SUMS]
    return (
        select(UsageHour.tenant_id, *sums)
        .where(UsageHour.hour >= since, UsageHour.hour < before)
        .group_by(UsageHour.tenant_id)
    )


def _days(day: date) -> Select[Any]:
    """Return a query for the usage of the day in the columns of ``_rolled``: all tokens are in one of them."""
    sums = {"operations": UsageDay.operations, "train_tokens": UsageDay.tokens}
    columns = [func.sum(sums.get(name, literal(0))).label(name) for name in SUMS]
    return select(UsageDay.tenant_id, *columns).where(UsageDay.day == day.isoformat()).group_by(UsageDay.tenant_id)


def _as_day(sums: Mapping[str, int]) -> Sums:
    tokens = sums["train_tokens"] + sums["prompt_tokens"] + sums["sampled_tokens"]
    return {"operations": sums["operations"], "tokens": tokens}


def _differences(
    table: str, told: Mapping[str, Sums], counted: Mapping[str, Sums], names: Collection[str]
) -> list[Mismatch]:
    nothing = dict.fromkeys(names, 0)
    return [
        Mismatch(tenant, table, name, told.get(tenant, nothing)[name], counted.get(tenant, nothing)[name])
        for tenant in sorted(told.keys() | counted.keys())
        for name in names
        if told.get(tenant, nothing)[name] != counted.get(tenant, nothing)[name]
    ]
