"""Rates of keys and of projects: lines of their own, in which an operation stands beside its tenant's.

Each line is one of ``tenants.rates``: charged in the transaction that inserts the operation, and worked off by time alone,
whether or not its operations can run. So an operation may run once each of its lines lets it, no line waits for another, and none
lets more through than its rate. A key that takes another one's place stands in that one's line.

A charge takes the pace from the line's row, so it is never at one that was changed meanwhile.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Double,
    String,
    Table,
    bindparam,
    case,
    delete,
    exists,
    func,
    select,
    tuple_,
    update,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.rate_lines import RateLine, RateScope
from store.batcher import few_lengths
from store.inserts import insert_unless_present
from store.pending_operations import pending_sample
from store.tables import Operation, RateLineRow, RatePlace
from tenants.budgets import PAYER, paying_keys
from tenants.rates import Meter, Pace, RateState, pace_of
from tenants.rights import Principal

lines = cast(Table, RateLineRow.__table__)
places = cast(Table, RatePlace.__table__)
_operations = cast(Table, Operation.__table__)

_NAME = (lines.c.tenant_id, lines.c.scope, lines.c.scope_id, lines.c.meter)
_COST = bindparam("line_cost", type_=BigInteger)
_AT = bindparam("at", type_=Double)
STATE_COLUMNS = (*_NAME, lines.c.tat, lines.c.per_second, lines.c.burst, lines.c.charged)
"""Columns of a line with its state (``states_in``)."""
IS_LINE = [column == bindparam(f"of_{column.name}") for column in _NAME]


@dataclass(frozen=True, slots=True)
class LineHold:
    """Line that holds an operation longest, and the time, in seconds since 1970, until which it does."""

    line: RateLine
    per_second: float
    until: float


def lines_of(
    caller: Principal, meter: Meter, project: str | None, project_limits: Mapping[str, int] | None
) -> tuple[RateLine, ...]:
    """Return the lines in which work of the caller, in the project, stands beside its tenant's."""
    found: list[RateLine] = []
    if pace_of(caller.rights.limits, meter) is not None:
        found.append(RateLine(caller.tenant, RateScope.KEY, str(caller.payer), meter))
    if project is not None and pace_of(project_limits, meter) is not None:
        found.append(RateLine(caller.tenant, RateScope.PROJECT, project, meter))
    return tuple(found)


# --- giving back -------------------------------------------------------------------------------------------------------

has_places = select(places.c.operation_id).where(places.c.operation_id == _operations.c.id).exists()
"""Condition on an operation that stands in a line."""
_PLACES_OF = (
    select(places.c.operation_id, places.c.line_id, places.c.mark, places.c.cost, *_NAME)
    .join(lines, lines.c.id == places.c.line_id)
    .where(places.c.operation_id.in_(bindparam("ids", expanding=True)))
    .order_by(places.c.mark)
)
_GIVEN_BACK = (
    update(lines)
    .where(lines.c.id == bindparam("line"))
    .values(tat=func.coalesce(lines.c.tat - _COST / lines.c.per_second, lines.c.tat), returned=lines.c.returned + _COST)
)


async def settle_lines(transaction: AsyncSession, used: Mapping[str, int], *, is_late: bool) -> None:
    """Give back what operations that ended were charged and did not use. ``is_late``: their charges went back already."""
    rests: dict[tuple[RateLine, int], int] = {}
    for row in await transaction.execute(_PLACES_OF, {"ids": few_lengths(sorted(used))}):
        key = (_line(row), row.line_id)
        rests[key] = rests.get(key, 0) + (0 if is_late else row.cost) - used[row.operation_id]
    given = [{"line": line, "line_cost": rests[name, line]} for name, line in sorted(rests) if rests[name, line]]
    if given:
        await transaction.execute(_GIVEN_BACK, given)


_LEFT = (
    update(lines)
    .where(lines.c.id == bindparam("line"))
    .values(
        tat=func.coalesce(lines.c.tat - _COST / lines.c.per_second, lines.c.tat),
        charged=lines.c.charged - _COST,
    )
)
_LAST = 2**62
_MOVE_UP = (
    update(places)
    .where(
        places.c.line_id == bindparam("line"),
        places.c.mark > bindparam("after"),
        places.c.mark < bindparam("upto", type_=BigInteger),
    )
    .values(mark=places.c.mark - _COST)
)


async def leave_lines(transaction: AsyncSession, cancelled: Sequence[str]) -> None:
    """Take operations that were cancelled out of their lines, and close the gaps behind them."""
    ids = {"ids": few_lengths(sorted(cancelled))}
    totals: dict[tuple[RateLine, int], int] = {}
    for row in await transaction.execute(_PLACES_OF, ids):
        key = (_line(row), row.line_id)
        totals[key] = totals.get(key, 0) + row.cost
    if not totals:
        return
    await transaction.execute(_LEFT, [{"line": line, "line_cost": totals[name, line]} for name, line in sorted(totals)])
    # Read again: until its line was locked, a place might have moved.
    found = (await transaction.execute(_PLACES_OF, ids)).all()
    moved: list[dict[str, int]] = []
    for _, line in totals:
        own = [row for row in found if row.line_id == line]
        sums = accumulate(row.cost for row in own)
        for row, following, cost in zip(own, [*own[1:], None], sums, strict=True):
            upto = _LAST if following is None else following.mark
            if row.mark + row.cost < upto:
                moved.append({"line": line, "after": row.mark, "upto": upto, "line_cost": cost})
    if moved:
        await transaction.execute(_MOVE_UP, moved)


_PRUNE = delete(places).where(places.c.operation_id.in_(bindparam("ids", expanding=True)))


async def prune_places(transaction: AsyncSession, operations: Sequence[str]) -> None:
    """Forget the places of operations that ended long ago."""
    await transaction.execute(_PRUNE, {"ids": few_lengths(list(operations))})


# --- waiting -----------------------------------------------------------------------------------------------------------

_room = lines.c.burst - places.c.cost
_FREE_BEHIND = lines.c.charged - places.c.mark + case((_room > 0, _room), else_=0)
_UNTIL = lines.c.tat - _FREE_BEHIND / lines.c.per_second
_PLACED = places.join(lines, lines.c.id == places.c.line_id)


def held_until(operation: ColumnElement[Any]) -> ColumnElement[float | None]:
    """Return the time, in seconds since 1970, from which all lines of an operation let it run; NULL where it has none."""
    until = select(func.max(_UNTIL)).select_from(_PLACED)
    return (
        until.where(places.c.operation_id == operation, lines.c.per_second.is_not(None))
        .correlate_except(places, lines)
        .scalar_subquery()
    )


def is_held(operation: ColumnElement[Any], at: ColumnElement[float]) -> ColumnElement[bool]:
    """Return the condition that a line holds the operation at a time in seconds since 1970."""
    held = select(places.c.operation_id).select_from(_PLACED)
    return (
        held.where(places.c.operation_id == operation, lines.c.per_second.is_not(None), at < _UNTIL)
        .correlate_except(places, lines)
        .exists()
    )


def next_of_lines(
    meter: Meter, base_model: ColumnElement[str], at: ColumnElement[float]
) -> ColumnElement[float | None]:
    """Return when the next sample that a line holds, and nobody has claimed, may run; in seconds since 1970.

    Of each line that is not worked off only what is first in it is looked for.
    """
    waiting = _operations.alias("line_waiting")
    ahead = lines.c.charged - (lines.c.tat - at) * lines.c.per_second
    first = (
        select(_UNTIL)
        .select_from(places.join(waiting, waiting.c.id == places.c.operation_id))
        .where(
            places.c.line_id == lines.c.id,
            places.c.mark > ahead,
            at < _UNTIL,
            pending_sample(waiting),
            waiting.c.base_model == base_model,
            waiting.c.taken_by.is_(None),
        )
        .order_by(places.c.mark)
        .limit(1)
        .correlate(lines)
        .scalar_subquery()
    )
    of_lines = select(first.label("until")).where(lines.c.tat > at, lines.c.meter == meter.value).subquery()
    return select(func.min(of_lines.c.until)).scalar_subquery()


_HOLDING = (
    select(places.c.operation_id, lines.c.per_second, _UNTIL.label("until"), *_NAME)
    .select_from(_PLACED)
    .where(places.c.operation_id.in_(bindparam("ids", expanding=True)), lines.c.per_second.is_not(None))
)


async def holding_lines(session: AsyncSession, operations: Collection[str]) -> dict[str, LineHold]:
    """Return of each operation the line that holds it longest."""
    found: dict[str, LineHold] = {}
    for row in await session.execute(_HOLDING, {"ids": few_lengths(sorted(operations))}):
        hold = LineHold(_line(row), row.per_second, row.until)
        if row.operation_id not in found or found[row.operation_id].until < hold.until:
            found[row.operation_id] = hold
    return found


def name_keys(line: RateLine) -> dict[str, object]:
    return {
        "of_tenant_id": line.tenant,
        "of_scope": line.scope.value,
        "of_scope_id": line.scope_id,
        "of_meter": line.meter,
    }


# --- settings ----------------------------------------------------------------------------------------------------------

_SPEED = bindparam("speed", type_=Double)
_DEBT = (lines.c.tat - _AT) * func.coalesce(lines.c.per_second, 0.0)
_PACED = (
    update(lines)
    .where(*IS_LINE)
    .values(
        # What is charged already is worked off at the new pace; without one before, nothing of it is left.
        tat=case((lines.c.tat > _AT, _AT + _DEBT / _SPEED), else_=_AT),
        per_second=_SPEED,
        burst=bindparam("room", type_=BigInteger),
    )
)
_UNPACED = update(lines).where(*IS_LINE).values(per_second=None)


async def set_line_paces(
    transaction: AsyncSession,
    tenant: TenantId,
    scope: RateScope,
    scope_id: str,
    limits: Mapping[str, int],
    now: datetime,
) -> None:
    """Give the lines of a key or a project the rates among ``limits``; without one, nothing waits for its line any more."""
    for meter in sorted(Meter):
        line, pace = RateLine(tenant, scope, scope_id, meter), pace_of(limits, meter)
        if pace is None:
            await transaction.execute(_UNPACED, name_keys(line))
            continue
        new = {column.name: value for column, value in zip(_NAME, name_keys(line).values(), strict=True)}
        state = {"tat": 0.0, "per_second": pace.per_second, "burst": pace.burst, "charged": 0, "returned": 0}
        await transaction.execute(insert_unless_present(transaction, RateLineRow).values(new | state))
        moved = {"at": now.timestamp(), "speed": pace.per_second, "room": pace.burst}
        await transaction.execute(_PACED, name_keys(line) | moved)


_FORGOTTEN = delete(lines).where(
    lines.c.scope == RateScope.KEY.value,
    lines.c.scope_id.in_(bindparam("keys", expanding=True)),
    ~exists().where(sql_cast(PAYER, String) == lines.c.scope_id, paying_keys.c.tenant_id == lines.c.tenant_id),
)


async def forget_lines_of_keys(transaction: AsyncSession, keys: Collection[int]) -> None:
    """Delete the lines of keys that are gone, unless one is there that has taken their place."""
    if keys:
        await transaction.execute(_FORGOTTEN, {"keys": [str(key) for key in sorted(keys)]})


# --- reports -----------------------------------------------------------------------------------------------------------

_STATES = select(*STATE_COLUMNS).where(lines.c.per_second.is_not(None))
_STATES_OF = _STATES.where(tuple_(*_NAME).in_(bindparam("names", expanding=True)))
_STATES_OF_TENANT = _STATES.where(lines.c.tenant_id == bindparam("tenant")).order_by(*_NAME)


async def line_states(session: AsyncSession, which: Iterable[RateLine]) -> dict[RateLine, RateState]:
    """Return the states of the lines that have a rate. No statement for none."""
    names = [(one.tenant, one.scope.value, one.scope_id, one.meter) for one in sorted(which)]
    return states_in(await session.execute(_STATES_OF, {"names": names})) if names else {}


async def line_states_of_tenant(session: AsyncSession, tenant: TenantId) -> dict[RateLine, RateState]:
    """Return the states of all rates of the tenant's keys and projects."""
    return states_in(await session.execute(_STATES_OF_TENANT, {"tenant": tenant}))


def states_in(rows: Iterable[Any]) -> dict[RateLine, RateState]:
    """Return the states in rows with ``STATE_COLUMNS``; none of owners or meters that only another version knows."""
    known = [row for row in rows if row.scope in [*RateScope] and row.meter in [*Meter]]
    return {_line(row): RateState(row.tat, Pace(row.per_second, row.burst), row.charged) for row in known}


def _line(row: Any) -> RateLine:
    return RateLine(TenantId(row.tenant_id), RateScope(row.scope), row.scope_id, row.meter)
