"""Holds of accepted work by a rate or a spent budget: whether an operation is held, why, and until when."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil
from typing import Any, cast

from sqlalchemy import Select, Table, bindparam, case, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import RequestId
from contracts.operations import OperationKind
from contracts.rate_lines import RateScope
from contracts.waiting import WaitReason
from store.batcher import few_lengths
from store.pending_operations import IS_PENDING
from store.tables import Operation
from tenants.budgets import budget_keys, first_spent, payer_of, project_of, spent_budgets
from tenants.rate_lines import LineHold, held_until, holding_lines
from tenants.rates import COLUMNS, Meter, rates, seconds_to_wait

_operations = cast(Table, Operation.__table__)


@dataclass(frozen=True, slots=True)
class Hold:
    """Hold of an operation. ``until``: when it ends by itself; None where only a raise ends it."""

    reason: WaitReason
    told: str
    until: datetime | None


_METER = case((_operations.c.kind == literal_column("'sample'"), Meter.SAMPLE.value), else_=Meter.TRAIN.value)
_HELD: Select[Any] = (
    select(
        _operations.c.id,
        _operations.c.kind,
        _operations.c.seq_id,
        payer_of(_operations.c.key_id).label("payer"),
        project_of(_operations.c.tenant_id, _operations.c.lane).label("project"),
        _operations.c.tokens,
        _operations.c.reserved_tokens,
        _operations.c.rate_mark,
        _operations.c.taken_by,
        spent_budgets(_operations.c.tenant_id).label("spent_budgets"),
        held_until(_operations.c.id).label("lines_until"),
        *COLUMNS,
    )
    .select_from(_operations)
    .outerjoin(rates, (rates.c.tenant_id == _operations.c.tenant_id) & (rates.c.meter == _METER))
    .where(_operations.c.id.in_(bindparam("ids", expanding=True)), IS_PENDING)
)


def is_budgeted(seq_id: int, cost: int) -> bool:
    """Return whether a spent budget holds accepted work of ``cost`` tokens: whatever takes any, and a model's creation.

    Steps and saves go on, so that work can be kept.
    """
    return cost > 0 or seq_id == 0


async def holds_of(session: AsyncSession, operations: Sequence[str], now: datetime) -> dict[RequestId, Hold]:
    """Return what holds each of the pending operations, leaving out those that nothing holds."""
    rows = (await session.execute(_HELD, {"ids": few_lengths(operations), **budget_keys(now)})).all()
    in_line = [row.id for row in rows if (row.lines_until or 0.0) > now.timestamp()]
    lines = await holding_lines(session, in_line) if in_line else {}
    found = {RequestId(row.id): _hold(row, lines.get(row.id), now) for row in rows}
    return {operation: hold for operation, hold in found.items() if hold is not None}


def _hold(row: Any, of_line: LineHold | None, now: datetime) -> Hold | None:
    is_sample = row.kind == OperationKind.SAMPLE
    cost = row.reserved_tokens if is_sample else row.tokens
    if row.taken_by is not None:
        return None
    spent = first_spent(row.spent_budgets, row.payer, row.project)
    if spent is not None and is_budgeted(row.seq_id, cost):
        return Hold(WaitReason.BUDGET, spent.told(now), spent.ends(now))
    if not cost:
        return None
    seconds, whose, per_second = seconds_to_wait(row, cost, now), "your rate", row.rate_per_second
    if of_line is not None and (of_its_own := of_line.until - now.timestamp()) > seconds:
        seconds, whose, per_second = of_its_own, f"the rate of this {_OWNERS[of_line.line.scope]}", of_line.per_second
    if not seconds:
        return None
    kind = "samples" if is_sample else "training"
    a_minute = f"{round(per_second * 60)} tokens of {kind} a minute"
    text = f"{whose} of {a_minute} is used up; this request runs in about {ceil(seconds)} s"
    return Hold(WaitReason.RATE_LIMIT, text, now + timedelta(seconds=seconds))


_OWNERS = {RateScope.KEY: "API key", RateScope.PROJECT: "project"}
