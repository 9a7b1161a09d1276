"""Charges for operations that are accepted, and settlement of those that end, once, in the transaction that does it.

What they reserved of rates and did not use goes back, and what they used counts against the tenant's budgets. The rates of keys
and projects (``tenants.rate_lines``) are locked after those of tenants.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any

from sqlalchemy import BigInteger, Row, bindparam, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId, TenantId
from contracts.ledger_records import NewOperation
from contracts.operations import OperationKind
from ledger.statements import (
    CUT_UNCOUNTED,
    INSERT_CHARGED,
    INSERT_COUNTED_PAYLOAD,
    INSERT_COUNTED_PAYLOAD_IN_LINES,
    INSERT_UNLESS_PRESENT,
    MARK,
    METER_CANCELLED,
    operations,
)
from store.pending_operations import IS_PENDING, IS_SAMPLE, IS_TRAINING
from tenants.line_charges import charge_keys as charge_keys_of_lines
from tenants.line_charges import charge_lines_of
from tenants.prices import PricedQuantity
from tenants.rate_lines import leave_lines, settle_lines, states_in
from tenants.rates import CHARGE, Meter, Pace, RateState, charge_keys, give_back, rates, tightest
from tenants.spending import Spender, Spending, spend
from tenants.usage_costs import of_sample

Charged = Row[*tuple[Any, ...]]
"""Row of an operation with ``CHARGED_COLUMNS``."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """An operation that was inserted. ``rate``: its tenant's rate after it, None without one."""

    rate: RateState | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """Id of an accepted request. For new training also the pending training of its tenant, counted with this one.

    - ``rate``: the tightest of its rates after it, None without one and for a repeat.
    - ``loads_of``: tenant of the checkpoint that it loads, None if that is not known yet, and for a repeat.
    """

    id: RequestId
    operations: int = 0
    nbytes: int = 0
    rate: RateState | None = None
    loads_of: TenantId | None = None


async def insert_operation(
    transaction: AsyncSession, values: dict[str, Any], pace: Pace | None, now: datetime
) -> Inserted | None:
    """Insert an operation; return None when its key exists. With ``pace`` its tenant is charged, in any case."""
    dialect = transaction.get_bind().dialect.name
    plain = INSERT_UNLESS_PRESENT[dialect]
    if pace is None:
        return None if (await transaction.execute(plain, values)).one_or_none() is None else Inserted()
    cost = values["tokens"]
    keys = charge_keys(values["tenant_id"], Meter.of(values["kind"]), pace, cost, now)
    if dialect == "postgresql":
        charged = (await transaction.execute(INSERT_CHARGED, values | keys)).one_or_none()
    else:
        charged = (await transaction.execute(CHARGE[dialect], keys)).one()
        if (await transaction.execute(plain, values | {"rate_mark": charged.mark})).one_or_none() is None:
            return None
    return None if charged is None else Inserted(RateState(charged.tat, pace, charged.mark + cost))


async def insert_counted(
    transaction: AsyncSession, new: NewOperation, payload: dict[str, Any], rate: RateState | None, now: datetime
) -> Accepted:
    """Insert the payload of a training operation, charge its lines, and count its tenant's pending training.

    ``rate`` is the tenant's after it. The lines come after the count's lock: nobody waits for that one with a line.
    """
    dialect = transaction.get_bind().dialect.name
    if dialect == "postgresql" and new.tokens and new.lines:
        keys = charge_keys_of_lines(new.lines, new.id, new.tokens, now)
        rows = (await transaction.execute(INSERT_COUNTED_PAYLOAD_IN_LINES, payload | keys)).all()
        use, states = rows[0], states_in(row for row in rows if row.scope is not None)
        rate = tightest(states.values() if rate is None else [rate, *states.values()], now)
    else:
        use = (await transaction.execute(INSERT_COUNTED_PAYLOAD[dialect], payload)).one()
        rate = await charge_own_lines(transaction, new, rate, now)
    return Accepted(RequestId(new.id), use.pending_operations, use.pending_bytes, rate)


async def charge_own_lines(
    transaction: AsyncSession, new: NewOperation, rate: RateState | None, now: datetime
) -> RateState | None:
    """Charge the lines of an operation that was inserted. Return the tightest of its rates, of which ``rate`` is the tenant's."""
    cost = new.tokens if new.demand is None else new.demand.tokens
    states = await charge_lines_of(transaction, new.lines, new.id, cost, now) if cost and new.lines else {}
    return tightest(states.values() if rate is None else [rate, *states.values()], now)


async def settle(
    transaction: AsyncSession,
    ended: Iterable[tuple[Charged, Mapping[PricedQuantity, int]]],
    now: datetime,
    *,
    is_late: bool = False,
) -> None:
    """Settle operations that have ended, each with the tokens that it used.

    ``is_late``: all that they had reserved went back when they were cancelled.
    """
    rests: Counter[tuple[TenantId, Meter]] = Counter()
    placed: dict[str, int] = {}
    spent: dict[tuple[Spender, str, datetime], Counter[PricedQuantity]] = {}
    for row, used in ended:
        tenant = TenantId(row.tenant_id)
        if row.rate_mark is not None:
            rests[tenant, Meter.of(row.kind)] += (0 if is_late else cost_of(row)) - sum(used.values())
        if row.has_places:
            placed[row.id] = sum(used.values())
        if row.has_budget and any(used.values()):
            # Usage counts it in the hour of its end, and a session's id begins its lanes'.
            hour = (row.finished_at or now).replace(minute=0, second=0, microsecond=0)
            spender = Spender(tenant, row.key_id, row.lane.partition(":")[0])
            spent.setdefault((spender, row.base_model, hour), Counter()).update(used)
    await give_back(transaction, rests.items())
    if placed:
        await settle_lines(transaction, placed, is_late=is_late)
    if spent:
        await spend(transaction, [Spending(*key, quantities) for key, quantities in spent.items()], now)


def cut_row(operation: str, prompt: int, drawn: int, cached: int) -> dict[str, Any]:
    """Return the parameters of ``METER_CANCELLED``."""
    return {"operation_id": operation, "used": prompt + drawn, "made": drawn, "cached": cached}


async def count_cut(transaction: AsyncSession, cut: Sequence[dict[str, Any]], now: datetime) -> None:
    """Count the tokens that cancelled samples had drawn, once: ``cut`` are the parameters of ``METER_CANCELLED``."""
    used = {one["operation_id"]: of_sample(one["used"] - one["made"], one["cached"], one["made"]) for one in cut}
    late = (await transaction.execute(CUT_UNCOUNTED, {"ids": list(used)})).all()
    await transaction.execute(METER_CANCELLED, cut)
    await settle(transaction, [(row, used[row.id]) for row in late], now, is_late=True)


async def settle_cancelled(transaction: AsyncSession, cancelled: Sequence[Charged]) -> None:
    """Give back all that operations reserved which were ended before they were done, and close the gaps in the lines.

    What waits behind one runs earlier by its tokens, and what was before it no earlier than it would have.
    """
    lines: dict[tuple[TenantId, Meter], list[Charged]] = {}
    for row in cancelled:
        if row.rate_mark is not None:
            lines.setdefault((TenantId(row.tenant_id), Meter.of(row.kind)), []).append(row)
    for key in sorted(lines):
        await _leave_line(transaction, *key, lines[key])
    placed = [row.id for row in cancelled if row.has_places]
    if placed:
        await leave_lines(transaction, placed)


def cost_of(row: Any) -> int:
    """Return the tokens with which the operation of a row was charged."""
    cost: int = row.reserved_tokens if row.kind == OperationKind.SAMPLE else row.tokens
    return cost


_LEFT = (
    update(rates)
    .where(rates.c.tenant_id == bindparam("rate_tenant"), rates.c.meter == bindparam("rate_meter"))
    .values(
        tat=func.coalesce(rates.c.tat - bindparam("cost", type_=BigInteger) / rates.c.per_second, rates.c.tat),
        charged=rates.c.charged - bindparam("cost", type_=BigInteger),
    )
)
_BEHIND = (
    select(operations.c.id, operations.c.rate_mark)
    .where(
        IS_PENDING,
        operations.c.tenant_id == bindparam("tenant"),
        operations.c.rate_mark > bindparam("mark"),
    )
    .order_by(operations.c.id)
    # One that is locked is being ended: it waits for nothing.
    .with_for_update(skip_locked=True)
)
_BEHIND_OF = {Meter.TRAIN: _BEHIND.where(IS_TRAINING), Meter.SAMPLE: _BEHIND.where(IS_SAMPLE)}
_MOVE_UP = {
    meter: update(operations)
    .where(operations.c.id.in_(behind.with_only_columns(operations.c.id)))
    .values(rate_mark=operations.c.rate_mark - bindparam("cost", type_=BigInteger))
    for meter, behind in _BEHIND_OF.items()
}
"""Moves all behind one operation up by its cost, in one statement: a client cancels thousands one by one."""


async def _leave_line(transaction: AsyncSession, tenant: TenantId, meter: Meter, cancelled: Sequence[Charged]) -> None:
    """Take the operations out of the line of a rate."""
    ordered = sorted(cancelled, key=lambda row: row.rate_mark)
    # Locks the line: whoever charges it has committed, or waits.
    total = sum(map(cost_of, ordered))
    await transaction.execute(_LEFT, {"rate_tenant": tenant, "rate_meter": meter.value, "cost": total})
    marks = [row.rate_mark for row in ordered]
    if len(marks) == 1:
        await transaction.execute(_MOVE_UP[meter], {"tenant": tenant, "mark": marks[0], "cost": total})
        return
    sums = [0, *accumulate(map(cost_of, ordered))]
    behind = await transaction.execute(_BEHIND_OF[meter], {"tenant": tenant, "mark": marks[0]})
    moved = [
        {"operation_id": row.id, "mark": row.rate_mark - sums[bisect_left(marks, row.rate_mark)]} for row in behind
    ]
    if moved:
        await transaction.execute(MARK, moved)
