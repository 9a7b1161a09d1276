"""Additions of prices, of the service or of one tenant, and what they change of the hour that runs.

A price may hold from the beginning of the hour that runs. What budgets in money were charged in that hour is then charged
anew, in the transaction that adds the price, so that a budget and a bill never differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from itertools import groupby
from typing import Any, Final

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from store.clock import Clock
from store.tables import Price, TenantPrice
from store.tables.prices import PRICE_DIGITS, PRICE_PLACES
from tenants.budget_settings import cost_of_line
from tenants.budgets import BUDGET_ID, KEY, PROJECT, TENANT, TOKENS, budgets
from tenants.limits import Counted, hold_count
from tenants.prices import ANY_BASE, EXACT, PricedQuantity, PriceLine, Tariff, currency_of, tariff, tariffs
from tenants.spending import Added, add_to_budgets, payers_of
from tenants.usage_hours import UsageLine, usage_of_tenants

MOST_PRICES: Final = 500
"""Most prices of the service, and of each tenant: every look at usage reads them all."""
_CHARGED_FOR: Final = timedelta(hours=2)
"""Time from the running hour's begin on in which anything can be charged already: clocks differ by less than an hour."""
_TENANTS_AT_ONCE: Final = 500
_EVERYBODY: Final = TenantId("")
"""Owner of the lock of prices, whosever price is added."""


@dataclass(frozen=True, slots=True)
class NewPrice:
    """A price to add. ``valid_from`` None: from the hour that runs. ``tenant``: the one whose own price it is."""

    meter: PricedQuantity
    amount: str
    currency: str
    base_model: str | None = None
    valid_from: datetime | None = None
    tenant: TenantId | None = None


async def add_price(transaction: AsyncSession, new: NewPrice, clock: Clock) -> PriceLine:
    """Add a price.

    Raises ``InvalidRequest`` for an amount that is none, a time that is no whole hour or is past, another currency than the
    other prices have, and a second price of the same hour.
    """
    now = clock()
    running = now.replace(minute=0, second=0, microsecond=0)
    begin = running if new.valid_from is None else new.valid_from
    _check_begin(begin, running)
    # Prices that are added at once are held against each other, too.
    await hold_count(transaction, Counted.PRICES, [_EVERYBODY])
    await _check_currency(transaction, new.currency)
    if new.meter is PricedQuantity.STORAGE and new.base_model is not None:
        raise InvalidRequest("storage has one price for all base models; leave the base model out")
    before = await tariff(transaction, new.tenant)
    known = before.lines if new.tenant is None else before.own
    if len(known) >= MOST_PRICES:
        raise InvalidRequest(f"there are {MOST_PRICES} prices, and no room for more")
    line = PriceLine(new.base_model, new.meter, _amount(new.amount), new.currency, begin)
    if any((one.base_model, one.meter, one.valid_from) == (line.base_model, line.meter, begin) for one in known):
        raise InvalidRequest(
            f"{new.meter} has a price from {begin.isoformat()} on already; begin this one an hour later"
        )
    values = {
        "base_model": line.base_model or ANY_BASE,
        "meter": line.meter,
        "amount": line.amount,
        "currency": line.currency,
        "valid_from": line.valid_from,
        "created_at": now,
    }
    own = insert(TenantPrice).values(**values, tenant_id=new.tenant)
    await transaction.execute(insert(Price).values(values) if new.tenant is None else own)
    if new.meter is not PricedQuantity.STORAGE and begin < running + _CHARGED_FOR:
        await _charge_anew(transaction, line, new.tenant, now)
    return line


def _check_begin(begin: datetime, running: datetime) -> None:
    if begin != begin.replace(minute=0, second=0, microsecond=0):
        raise InvalidRequest(f"a price begins at a whole hour of UTC; got {begin.isoformat()}")
    if begin < running:
        raise InvalidRequest(f"a price cannot begin before the hour that runs, {running.isoformat()}: past costs stay")


async def _check_currency(session: AsyncSession, currency: str) -> None:
    if not (len(currency) == 3 and currency.isascii() and currency.isalpha() and currency.isupper()):
        raise InvalidRequest(f"currency must be three capital letters, such as USD; got {currency[:20]!r}")
    known = await currency_of(session)
    if known not in (None, currency):
        raise InvalidRequest(f"all prices have one currency, which is {known}; got {currency}")


def _amount(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise InvalidRequest(f"an amount is a decimal number, such as 0.60; got {text[:50]!r}") from None
    if not amount.is_finite() or not 0 <= amount < 10 ** (PRICE_DIGITS - PRICE_PLACES):
        raise InvalidRequest(
            f"an amount must be 0 or more and below 10^{PRICE_DIGITS - PRICE_PLACES}; got {text[:50]!r}"
        )
    exact = amount.quantize(Decimal(1).scaleb(-PRICE_PLACES), context=EXACT)
    if exact != amount:
        raise InvalidRequest(f"an amount has at most {PRICE_PLACES} decimal places; got {text[:50]!r}")
    return exact


async def _charge_anew(transaction: AsyncSession, line: PriceLine, tenant: TenantId | None, now: datetime) -> None:
    """Add to the budgets in money by how much the usage of the running hour costs more with the new price."""
    mine = [] if tenant is None else [budgets.c.tenant_id == tenant]
    locked = select(budgets).where(budgets.c.meter != TOKENS, *mine).order_by(*BUDGET_ID).with_for_update()
    rows = (await transaction.execute(locked)).all()
    # Everybody's work that ends waits for these locks, so whole groups of tenants are read at once.
    of_tenants = {owner: list(own) for owner, own in groupby(rows, key=lambda row: TenantId(row.tenant_id))}
    owners = list(of_tenants)
    for begin in range(0, len(owners), _TENANTS_AT_ONCE):
        some = {owner: of_tenants[owner] for owner in owners[begin : begin + _TENANTS_AT_ONCE]}
        await add_to_budgets(transaction, await _changes(transaction, line, tenant, some, now), now)


async def _changes(
    transaction: AsyncSession,
    line: PriceLine,
    tenant: TenantId | None,
    of_tenants: Mapping[TenantId, Sequence[Any]],
    now: datetime,
) -> list[tuple[Any, Added]]:
    """Return what each budget of these tenants is charged for the new price, in the hours that it changes."""
    running = now.replace(minute=0, second=0, microsecond=0)
    used = await usage_of_tenants(transaction, of_tenants, since=running, before=running + _CHARGED_FOR)
    if not used:
        return []
    every = [one for lines in used.values() for one in lines]
    payers = await payers_of(transaction, {one.key for one in every if one.key is not None})
    found = await tariffs(transaction, used, {one.base_model for one in every if one.base_model is not None})
    changes: list[tuple[Any, Added]] = []
    for owner, lines in used.items():
        prices = found[owner]
        earlier = Tariff(
            [one for one in prices.lines if tenant is not None or one != line],
            [one for one in prices.own if tenant is None or one != line],
        )
        for row in of_tenants[owner]:
            bounded = [one for one in lines if _bounds(row, one, payers.get(one.key or 0))]
            changes.append((row, _difference(bounded, earlier, prices)))
    return changes


def _bounds(row: Any, line: UsageLine, payer: int | None) -> bool:
    if row.scope == KEY:
        return bool(row.scope_id == str(payer))
    return bool(row.scope == TENANT or (row.scope == PROJECT and row.scope_id == line.project))


def _difference(lines: Sequence[UsageLine], earlier: Tariff, prices: Tariff) -> Added:
    total = Added()
    for line in lines:
        total += cost_of_line(prices, line, line.start) - cost_of_line(earlier, line, line.start)
    return total
