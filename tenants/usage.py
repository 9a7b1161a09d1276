"""Tenants' usage by day: operations and tokens, added up once for each operation when it is pruned.

``tenants.usage_hours`` has the same by hour, with all that it can be told apart by.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from sqlalchemy import ColumnElement, and_, bindparam, case, func, literal_column, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Cancelled
from contracts.ledger_records import OperationState
from store.inserts import dialect_insert
from store.tables import Operation, Tenant, UsageDay
from tenants.usage_hours import add_hours

_IS_DONE = Operation.state == OperationState.DONE
_DAYS: dict[str, ColumnElement[str]] = {
    "sqlite": func.date(Operation.finished_at),
    "postgresql": func.to_char(func.timezone("UTC", Operation.finished_at), "YYYY-MM-DD"),
}
"""The day (ISO, UTC) on which an operation ended, by dialect."""
_IS_METERED = or_(_IS_DONE, and_(Operation.error_code == Cancelled.code, Operation.tokens > 0))
"""Done operations, and samples that were cancelled after some tokens."""
_STALE = select(
    Operation.tenant_id,
    Operation.lane,
    Operation.key_id,
    Operation.base_model,
    Operation.kind,
    Operation.state,
    Operation.finished_at,
    Operation.tokens,
    Operation.sampled_tokens,
    Operation.cached_tokens,
    case((_IS_METERED, 1), else_=0).label("is_metered"),
).where(Operation.id.in_(bindparam("ids", expanding=True)))


@dataclass(frozen=True, slots=True)
class UsageLine:
    """A tenant's usage on one day (UTC): successful operations, and their tokens (for samples: prompt and drawn ones).

    The tokens of a sample that was cancelled while it was drawn count, too.
    """

    tenant: str
    day: date
    base_model: str
    kind: str
    operations: int
    tokens: int


async def roll_up(transaction: AsyncSession, ids: Sequence[str]) -> None:
    """Add the operations to their tenants' usage by hour and by day.

    The caller marks the operations as pruned in the same transaction, so that each counts once.
    """
    ended = (await transaction.execute(_STALE, {"ids": list(ids)})).all()
    await add_hours(transaction, ended)
    operations: Counter[tuple[str, str, str, str]] = Counter()
    tokens: Counter[tuple[str, str, str, str]] = Counter()
    for row in ended:
        if not row.is_metered:
            continue
        key = (row.tenant_id, row.finished_at.date().isoformat(), row.base_model, row.kind)
        operations[key] += row.state == OperationState.DONE
        tokens[key] += row.tokens
    if not operations:
        return
    insert = dialect_insert(transaction, UsageDay).values(
        [
            {
                "tenant_id": tenant,
                "day": day,
                "base_model": base_model,
                "kind": kind,
                "operations": count,
                "tokens": tokens[(tenant, day, base_model, kind)],
            }
            # Sorted, so that two transactions lock the rows in the same order and cannot deadlock.
            for (tenant, day, base_model, kind), count in sorted(operations.items())
        ]
    )
    await transaction.execute(
        insert.on_conflict_do_update(
            index_elements=[UsageDay.tenant_id, UsageDay.day, UsageDay.base_model, UsageDay.kind],
            set_={
                "operations": UsageDay.operations + insert.excluded.operations,
                "tokens": UsageDay.tokens + insert.excluded.tokens,
            },
        )
    )


async def usage(session: AsyncSession, *, since: date) -> list[UsageLine]:
    """Return every tenant's usage from ``since`` on, including operations that are not pruned yet."""
    day = _DAYS[session.get_bind().dialect.name]
    added = select(
        UsageDay.tenant_id, UsageDay.day, UsageDay.base_model, UsageDay.kind, UsageDay.operations, UsageDay.tokens
    ).where(UsageDay.day >= since.isoformat())
    recent = (
        select(
            Operation.tenant_id,
            day.label("day"),
            Operation.base_model,
            Operation.kind,
            func.sum(case((_IS_DONE, 1), else_=0)).label("operations"),
            func.sum(Operation.tokens).label("tokens"),
        )
        .where(
            Operation.finished_at.is_not(None),
            Operation.pruned_at.is_(None),
            _IS_METERED,
            day >= since.isoformat(),
        )
        .group_by(Operation.tenant_id, literal_column("2"), Operation.base_model, Operation.kind)
    )
    # One statement sees one state: what is pruned meanwhile is in one of the two.
    both = union_all(added, recent).subquery()
    names = (Tenant.name, both.c.day, both.c.base_model, both.c.kind)
    rows = await session.execute(
        select(*names, func.sum(both.c.operations).label("operations"), func.sum(both.c.tokens).label("tokens"))
        .join(both, Tenant.id == both.c.tenant_id)
        .group_by(*names)
        .order_by(*names)
    )
    return [
        UsageLine(row.name, date.fromisoformat(row.day), row.base_model, row.kind, int(row.operations), int(row.tokens))
        for row in rows
    ]
