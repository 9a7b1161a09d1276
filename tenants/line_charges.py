"""Charges of the rates of keys and projects (``tenants.rate_lines``), in the transaction that inserts the operation."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Double,
    FromClause,
    String,
    bindparam,
    case,
    func,
    insert,
    select,
    true,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.rate_lines import RateLine
from tenants.rate_lines import IS_LINE, STATE_COLUMNS, lines, name_keys, places, states_in
from tenants.rates import Pace, RateState

_COST = bindparam("line_cost", type_=BigInteger)
_AT = bindparam("at", type_=Double)

_CHARGE = (
    update(lines)
    .where(*IS_LINE, lines.c.per_second.is_not(None))
    .values(
        tat=case((lines.c.tat > _AT, lines.c.tat), else_=_AT) + _COST / lines.c.per_second,
        charged=lines.c.charged + _COST,
    )
    .returning(lines.c.id, lines.c.tat, lines.c.per_second, lines.c.burst, lines.c.charged)
)
_PLACE = insert(places)


class ChargedLines(NamedTuple):
    """Parts of a statement, of PostgreSQL, that charges one operation in its lines, with ``charge_keys``."""

    lines: CTE
    """The lines after the charge, with ``STATE_COLUMNS``; those without a rate any more are not there."""
    places: CTE
    """Inserts the operation's places. Add it to the statement."""


def charged_lines(after: FromClause | None = None) -> ChargedLines:
    """Return the parts. The lines are locked once ``after`` has given its one row."""
    asked = (
        func.unnest(bindparam("line_scopes", type_=ARRAY(String)), bindparam("line_ids", type_=ARRAY(String)))
        .table_valued("scope", "scope_id")
        .render_derived(name="asked")
    )
    found = lines.join(asked, (lines.c.scope == asked.c.scope) & (lines.c.scope_id == asked.c.scope_id))
    held = (
        select(lines.c.id)
        .select_from(found if after is None else found.join(after, true()))
        .where(lines.c.tenant_id == bindparam("line_tenant"), lines.c.meter == bindparam("line_meter"))
        .where(lines.c.per_second.is_not(None))
        # In the order of ``RateLine``, which is by code points.
        .order_by(lines.c.scope.collate("C"), lines.c.scope_id.collate("C"))
        .with_for_update(of=lines)
        .cte("held_lines")
    )
    charged = (
        update(lines)
        .where(lines.c.id == held.c.id)
        .values(tat=func.greatest(lines.c.tat, _AT) + _COST / lines.c.per_second, charged=lines.c.charged + _COST)
        .returning(lines.c.id, *STATE_COLUMNS)
        .cte("charged_lines")
    )
    taken = select(bindparam("line_operation", type_=String), charged.c.id, charged.c.charged - _COST, _COST)
    return ChargedLines(
        charged, insert(places).from_select([column.name for column in places.c], taken).cte("placed_lines")
    )


def charge_keys(of_it: Sequence[RateLine], operation: str, cost: int, now: datetime) -> dict[str, object]:
    """Return the parameters of ``charged_lines`` for an operation that stands in the lines, of one tenant and meter."""
    return {
        "line_tenant": of_it[0].tenant,
        "line_meter": str(of_it[0].meter),
        "line_scopes": [line.scope.value for line in of_it],
        "line_ids": [line.scope_id for line in of_it],
        "line_operation": operation,
        "line_cost": cost,
        "at": now.timestamp(),
    }


_charged = charged_lines()
_CHARGE_AND_PLACE = select(_charged.lines).add_cte(_charged.places)


async def charge_lines_of(
    transaction: AsyncSession, of_it: Sequence[RateLine], operation: str, cost: int, now: datetime
) -> dict[RateLine, RateState]:
    """Charge one operation in its lines, which are of one tenant and meter, as ``charge_lines``. PostgreSQL: one statement."""
    if transaction.get_bind().dialect.name == "sqlite":
        return await charge_lines(transaction, {line: [(operation, cost)] for line in of_it}, now)
    return states_in(await transaction.execute(_CHARGE_AND_PLACE, charge_keys(of_it, operation, cost, now)))


async def charge_lines(
    transaction: AsyncSession, charges: Mapping[RateLine, Sequence[tuple[str, int]]], now: datetime
) -> dict[RateLine, RateState]:
    """Charge each line with operations and their costs, in the order of their places, and return the lines' states.

    Without a rate any more, a line is left out.
    """
    states: dict[RateLine, RateState] = {}
    taken: list[dict[str, object]] = []
    for line in sorted(charges):
        costs = [cost for _, cost in charges[line]]
        total = sum(costs)
        row = (
            await transaction.execute(_CHARGE, name_keys(line) | {"at": now.timestamp(), "line_cost": total})
        ).one_or_none()
        if row is None:
            continue
        states[line] = RateState(row.tat, Pace(row.per_second, row.burst), row.charged)
        marks = accumulate(costs, initial=row.charged - total)
        taken += [
            {"operation_id": operation, "line_id": row.id, "mark": mark, "cost": cost}
            for (operation, cost), mark in zip(charges[line], marks, strict=False)
        ]
    if taken:
        await transaction.execute(_PLACE, taken)
    return states
