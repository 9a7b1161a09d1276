"""Spending: additions to the budgets that bound work, in the transaction that ends it, and alerts of marks that they cross.

Costs are exact: a token's has at most 16 decimal places, of which a budget's row has the millionths and the rest apart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, cast

from sqlalchemy import Table, and_, bindparam, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.webhooks import EventKind
from store.batcher import few_lengths
from store.inserts import insert_unless_present
from store.tables import BudgetAlert, Session
from tenants.budgets import BUDGET_ID, KEY, PAYER, PROJECT, TENANT, TOKENS, Period, budgets, paying_keys
from tenants.prices import EXACT, PricedQuantity, cost_text, tariffs
from tenants.reach import default_project
from tenants.webhook_events import TenantEvent, record_events

PARTS = 10**10
"""Parts of a unit of ``spent`` in a budget's row: of a token, or of a millionth of the currency."""
MONEY_PLACES = 16
"""Decimal places of one part of a budget in money."""
_MOST_SPENT = 2**62
_PERCENTS = (80, 100)
_ALERTS_KEPT = timedelta(days=400)
alerts = cast(Table, BudgetAlert.__table__)


@dataclass(frozen=True, slots=True, order=True)
class Spender:
    """A tenant, the key of the request that brought the work, if that is known, and the session that it was done in."""

    tenant: TenantId
    key: int | None
    session: str = ""


@dataclass(frozen=True, slots=True)
class Spending:
    """Tokens by meter that work of a spender used, on a base model and in the hour that begins at ``hour``."""

    spender: Spender
    base_model: str
    hour: datetime
    quantities: Mapping[PricedQuantity, int]

    @property
    def tokens(self) -> int:
        """Tokens of all meters."""
        return sum(self.quantities.values())


@dataclass(frozen=True, slots=True)
class Added:
    """Addition to a budget: parts of its unit, and tokens without a price."""

    parts: int = 0
    unpriced: int = 0

    def __add__(self, other: "Added") -> "Added":
        return Added(self.parts + other.parts, self.unpriced + other.unpriced)

    def __sub__(self, other: "Added") -> "Added":
        return Added(self.parts - other.parts, self.unpriced - other.unpriced)


def parts_of(cost: Decimal) -> int:
    """Return a cost in parts."""
    return int(cost.scaleb(MONEY_PLACES, context=EXACT))


_CHANGED = (
    update(budgets)
    .where(*(column == bindparam(f"of_{column.name}") for column in BUDGET_ID))
    .values(
        spent=bindparam("sum"),
        rest=bindparam("the_rest"),
        unpriced=bindparam("without_price"),
        resets_at=bindparam("until"),
    )
)


async def spend(transaction: AsyncSession, spendings: Sequence[Spending], now: datetime) -> None:
    """Add used tokens and their costs to the budgets that bound them, and record an alert for each mark that one crosses."""
    tenants = {one.spender.tenant for one in spendings}
    # Locked in one order, so that two transactions cannot deadlock; who comes second sees the sum of the first.
    locked = select(budgets).where(budgets.c.tenant_id.in_(tenants)).order_by(*BUDGET_ID).with_for_update()
    rows = (await transaction.execute(locked)).all()
    keys = {one.spender.key for one in spendings if one.spender.key is not None}
    payers = await payers_of(transaction, keys) if any(row.scope == KEY for row in rows) else {}
    sessions = {one.spender.session for one in spendings}
    projects = await _projects(transaction, sessions) if any(row.scope == PROJECT for row in rows) else {}
    priced = {TenantId(row.tenant_id) for row in rows if row.meter != TOKENS}
    # Read under the lock: a price that is added counts anew what was spent before it (``tenants.price_additions``).
    prices = await tariffs(transaction, priced, {one.base_model for one in spendings}) if priced else {}
    changes: list[tuple[Any, Added]] = []
    for row in rows:
        added = Added()
        for one in spendings:
            if not _bounds(row, one.spender, payers, projects):
                continue
            if row.meter == TOKENS:
                added += Added(one.tokens * PARTS)
            else:
                cost, unpriced = prices[one.spender.tenant].known_cost(one.quantities, one.base_model, one.hour)
                added += Added(parts_of(cost), unpriced)
        changes.append((row, added))
    await add_to_budgets(transaction, changes, now)


async def add_to_budgets(transaction: AsyncSession, changes: Sequence[tuple[Any, Added]], now: datetime) -> None:
    """Add to what is spent of budgets, whose rows are locked, in the period of ``now``."""
    changed: list[dict[str, object]] = []
    for row, added in changes:
        if added == Added():
            continue
        # Only the version that knows its period begins the next one.
        is_known = row.resets_at is not None and row.period in [*Period]
        is_over = is_known and Period(row.period).is_over(row.resets_at, now)
        before = Added() if is_over else Added(row.spent * PARTS + row.rest, row.unpriced)
        after = before + added
        spent, rest = divmod(max(0, after.parts), PARTS)
        names = {f"of_{column.name}": getattr(row, column.name) for column in BUDGET_ID}
        # Not back: another process, whose clock is ahead, may have begun the next period.
        end = _end(row, now)
        until = end if is_over or end is None or row.resets_at is None else max(row.resets_at, end)
        sums = {
            "sum": min(spent, _MOST_SPENT),
            "the_rest": rest,
            "without_price": max(0, after.unpriced),
            "until": until,
        }
        changed.append(names | sums)
        await alert(transaction, row, before=before.parts, after=after.parts, now=now)
    if changed:
        await transaction.execute(_CHANGED, changed)


def _bounds(row: Any, spender: Spender, payers: Mapping[int, int], projects: Mapping[str, str]) -> bool:
    if row.tenant_id != spender.tenant:
        return False
    bounding = {
        TENANT: "",
        KEY: str(payers.get(spender.key or 0)),
        PROJECT: projects.get(spender.session, default_project(spender.tenant)),
    }
    return bool(bounding.get(row.scope) == row.scope_id)


async def payers_of(session: AsyncSession, keys: Collection[int]) -> dict[int, int]:
    """Return the keys of whose budgets work by ``keys`` spends."""
    wanted = select(paying_keys.c.id, PAYER.label("payer")).where(paying_keys.c.id.in_(keys))
    return {row.id: row.payer for row in await session.execute(wanted)}


async def _projects(session: AsyncSession, sessions: Collection[str]) -> dict[str, str]:
    """Return the projects of those sessions that are in another than their tenant's default one."""
    wanted = Session.id.in_(few_lengths(sorted(sessions)))
    rows = await session.execute(select(Session.id, Session.project).where(wanted, Session.project.is_not(None)))
    return {row.id: row.project for row in rows}


def amount_told(parts: int, meter: str) -> Decimal:
    """Return a sum of parts in tokens or in the currency."""
    if meter == TOKENS:
        return Decimal(parts // PARTS)
    return Decimal(parts).scaleb(-MONEY_PLACES, context=EXACT)


async def alert(transaction: AsyncSession, row: Any, *, before: int, after: int, now: datetime) -> None:
    """Record an alert for each mark of the budget that lies between two sums, which are in parts; once in a period."""
    end = _end(row, now)
    for percent in _PERCENTS:
        if before * 100 < row.amount * PARTS * percent <= after * 100:
            key = {column.name: getattr(row, column.name) for column in BUDGET_ID}
            crossed = {**key, "period_end": "" if end is None else end.isoformat(), "percent": percent}
            values = {**crossed, "amount": row.amount, "at": now}
            added = insert_unless_present(transaction, BudgetAlert).values(values).returning(BudgetAlert.tenant_id)
            if await transaction.scalar(added) is not None:
                await record_events(transaction, [_event(row, percent, end)], now)
            old = and_(*(alerts.c[name] == value for name, value in key.items()), alerts.c.at < now - _ALERTS_KEPT)
            await transaction.execute(delete(alerts).where(old))


def _end(row: Any, now: datetime) -> datetime | None:
    """Return the end of the period in which ``now`` is; as the row has it for a period that only another version knows."""
    end: datetime | None = Period(row.period).end(now) if row.period in [*Period] else row.resets_at
    return end


def _event(row: Any, percent: int, end: datetime | None) -> TenantEvent:
    amount = amount_told(row.amount * PARTS, row.meter)
    is_money = row.meter != TOKENS
    data: dict[str, object] = {
        "key_id": int(row.scope_id) if row.scope == KEY else None,
        "project": row.scope_id if row.scope == PROJECT else None,
        "period": row.period,
        "percent": percent,
        "amount": cost_text(amount) if is_money else int(amount),
        "currency": row.meter if is_money else None,
        "ends_at": end,
    }
    subject = f"{row.scope}/{row.scope_id or row.tenant_id}/{row.period}"
    return TenantEvent(TenantId(row.tenant_id), EventKind.BUDGET_ALERT, subject, data)
