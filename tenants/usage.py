"""Tenants' usage by day: operations and tokens, added up once for each operation when it is pruned.

``tenants.usage_hours`` has the same by hour, with all that it can be told apart by.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Self

from sqlalchemy import (
    ColumnElement,
    Select,
    bindparam,
    case,
    func,
    literal,
    literal_column,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.ledger_records import OperationState
from store.inserts import dialect_insert
from store.tables import Operation, Tenant, UsageDay
from tenants.metered_operations import IS_METERED
from tenants.text_cursors import cursor_of, values_of, wrong_cursor
from tenants.usage_hours import add_hours

_IS_DONE = Operation.state == OperationState.DONE
_DAYS: dict[str, ColumnElement[str]] = {
    "sqlite": func.date(Operation.finished_at),
    "postgresql": func.to_char(func.timezone("UTC", Operation.finished_at), "YYYY-MM-DD"),
}
"""The day (ISO, UTC) on which an operation ended, by dialect."""
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
    case((IS_METERED, 1), else_=0).label("is_metered"),
).where(Operation.id.in_(bindparam("ids", expanding=True)))

_DAY_KEY = (UsageDay.tenant_id, UsageDay.day, UsageDay.base_model, UsageDay.kind)


@dataclass(frozen=True, slots=True)
class DayLine:
    """A tenant's usage on one day (UTC): successful operations, and their tokens (for samples: prompt and drawn ones).

    The tokens of a sample that was cancelled while it was drawn count, too, and of one that its tenant has made fail.
    """

    tenant_id: str
    tenant: str
    day: date
    base_model: str
    kind: str
    operations: int
    tokens: int

    @property
    def cursor(self) -> str:
        """Cursor of the page that begins behind this line."""
        return cursor_of(self.tenant_id, self.day.isoformat(), self.base_model, self.kind)

    @classmethod
    def before(cls, cursor: str) -> Self:
        """Return the line before a cursor's place, without its tenant's name and its sums. Raises ``InvalidRequest``."""
        tenant_id, day, base_model, kind = values_of(cursor, 4)
        try:
            return cls(tenant_id, "", date.fromisoformat(day), base_model, kind, 0, 0)
        except ValueError as error:
            raise wrong_cursor() from error


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
            index_elements=[*_DAY_KEY],
            set_={
                "operations": UsageDay.operations + insert.excluded.operations,
                "tokens": UsageDay.tokens + insert.excluded.tokens,
            },
        )
    )


async def tokens_since(session: AsyncSession, tenant: TenantId, since: datetime) -> int:
    """Return the tenant's tokens from the beginning of a day on, with those of operations that are not pruned yet."""
    day = since.date().isoformat()
    added = select(func.sum(UsageDay.tokens)).where(UsageDay.tenant_id == tenant, UsageDay.day >= day)
    ended = (Operation.pruned_at.is_(None), IS_METERED)
    recent = select(func.sum(Operation.tokens)).where(
        Operation.tenant_id == tenant, Operation.finished_at >= since, *ended
    )
    # One statement sees one state: what is pruned meanwhile is in one of the two.
    both = func.coalesce(added.scalar_subquery(), 0) + func.coalesce(recent.scalar_subquery(), 0)
    return int((await session.execute(select(both))).scalar_one())


def _both(
    day: ColumnElement[str], of_days: Sequence[ColumnElement[bool]], of_operations: Sequence[ColumnElement[bool]]
) -> Select[Any]:
    """Return the query of what was added to days and of what is not pruned yet, by tenant, day, base model and kind."""
    added = select(*_DAY_KEY, UsageDay.operations, UsageDay.tokens).where(*of_days)
    recent = (
        select(
            Operation.tenant_id,
            day.label("day"),
            Operation.base_model,
            Operation.kind,
            func.sum(case((_IS_DONE, 1), else_=0)).label("operations"),
            func.sum(Operation.tokens).label("tokens"),
        )
        .where(Operation.finished_at.is_not(None), Operation.pruned_at.is_(None), IS_METERED, *of_operations)
        .group_by(Operation.tenant_id, literal_column("2"), Operation.base_model, Operation.kind)
    )
    # One statement sees one state: what is pruned meanwhile is in one of the two.
    both = union_all(added, recent).subquery()
    key = (both.c.tenant_id, both.c.day, both.c.base_model, both.c.kind)
    sums = (func.sum(both.c.operations).label("operations"), func.sum(both.c.tokens).label("tokens"))
    joined = select(Tenant.name, *key, *sums).join(both, Tenant.id == both.c.tenant_id)
    return joined.group_by(Tenant.name, *key).order_by(*key)


async def usage(
    session: AsyncSession,
    *,
    since: date,
    tenant: str | None = None,
    after: DayLine | None = None,
    most: int | None = None,
) -> list[DayLine]:
    """Return usage from ``since`` on, including operations that are not pruned yet, of every tenant or of the one of that name.

    Lines are ordered by the tenant's id, day, base model and kind; at most ``most`` of those behind ``after`` are returned.
    """
    day = _DAYS[session.get_bind().dialect.name]
    of_days, of_operations = [UsageDay.day >= since.isoformat()], [day >= since.isoformat()]
    if tenant is not None:
        owner = select(Tenant.id).where(Tenant.name == tenant).scalar_subquery()
        of_days.append(UsageDay.tenant_id == owner)
        of_operations.append(Operation.tenant_id == owner)
    if after is not None:
        # The first column alone as well: an index of either table begins with it.
        place = tuple_(*map(literal, (after.tenant_id, after.day.isoformat(), after.base_model, after.kind)))
        of_days += [UsageDay.tenant_id >= after.tenant_id, tuple_(*_DAY_KEY) > place]
        key_of_operations = (Operation.tenant_id, day, Operation.base_model, Operation.kind)
        of_operations += [Operation.tenant_id >= after.tenant_id, tuple_(*key_of_operations) > place]
    rows = await session.execute(_both(day, of_days, of_operations).limit(most))
    return [
        DayLine(
            tenant_id=row.tenant_id,
            tenant=row.name,
            day=date.fromisoformat(row.day),
            base_model=row.base_model,
            kind=row.kind,
            operations=int(row.operations),
            tokens=int(row.tokens),
        )
        for row in rows
    ]
