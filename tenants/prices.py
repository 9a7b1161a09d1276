"""Prices of tokens and storage, and what a quantity costs in the hour in which it was used.

A price holds from a whole hour on until a later one of the same meter and base model. It is never changed, and none begins
before the hour that runs, so what a past hour cost stays what it was. A tenant may have prices of its own, which go before
those of the service. Amounts are exact decimals.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Context, Decimal
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Select, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.batcher import few_lengths
from store.tables import Price, TenantPrice
from store.tables.prices import PRICE_PLACES

ANY_BASE: Final = ""
HOURS_OF_A_MONTH: Final = 720
"""Hours of one GB-month, as the SDK counts them."""
_COST_PLACES: Final = PRICE_PLACES + 6
EXACT: Final = Context(prec=80)


class PricedQuantity(StrEnum):
    """Quantity that has a price: tokens by the million, or storage by the GB-month (10^9 bytes for 720 hours).

    ``prompt_tokens`` prices those that came from no cache; a cached one without a price of its own costs the same.
    """

    TRAIN_TOKENS = "train_tokens"
    PROMPT_TOKENS = "prompt_tokens"
    CACHED_PROMPT_TOKENS = "cached_prompt_tokens"
    SAMPLED_TOKENS = "sampled_tokens"
    STORAGE = "storage"


_UNITS: Final[Mapping[PricedQuantity, Decimal]] = {
    **dict.fromkeys(PricedQuantity, Decimal(10**6)),
    PricedQuantity.STORAGE: Decimal(10**9 * HOURS_OF_A_MONTH),
}
"""Tokens, or byte-hours, that an amount is for."""


@dataclass(frozen=True, slots=True)
class PriceLine:
    """One price: ``amount`` for a million tokens, or for a GB-month. ``base_model`` is None for every other base."""

    base_model: str | None
    meter: PricedQuantity
    amount: Decimal
    currency: str
    valid_from: datetime


_Book = Mapping[tuple[PricedQuantity, str | None], list[PriceLine]]


class Tariff:
    """Prices of the service, and one tenant's own, which go before them. Without prices nothing has a cost."""

    def __init__(self, lines: Iterable[PriceLine] = (), own: Iterable[PriceLine] = ()) -> None:
        self.lines = tuple(sorted(lines, key=lambda line: line.valid_from))
        """Prices of the service, the oldest first."""
        self.own = tuple(sorted(own, key=lambda line: line.valid_from))
        """The tenant's own prices, the oldest first."""
        self._books = (_book(self.own), _book(self.lines))

    @property
    def currency(self) -> str | None:
        """Currency of all prices, None without any."""
        return next((line.currency for line in (*self.lines, *self.own)), None)

    def currency_in(self, hour: datetime) -> str | None:
        """Return the currency of the prices that had begun by ``hour``, None without any: later ones do not change it."""
        return next((line.currency for line in (*self.lines, *self.own) if line.valid_from <= hour), None)

    def changes(self, after: datetime, before: datetime) -> list[datetime]:
        """Return the times between the two at which any price begins, in order."""
        return sorted({line.valid_from for line in (*self.lines, *self.own) if after < line.valid_from < before})

    def rate(self, meter: PricedQuantity, base_model: str | None, hour: datetime) -> Decimal | None:
        """Return the price of the meter for that base model in the hour that begins at ``hour``; None if it has none."""
        rates = (_rate(book, meter, base_model, hour) for book in self._books)
        return next((rate for rate in rates if rate is not None), None)

    def list_rate(self, meter: PricedQuantity, base_model: str | None, hour: datetime) -> Decimal | None:
        """Return the service's price in that hour. Where it has none it is the tenant's own one; None without either."""
        of_all = _rate(self._books[-1], meter, base_model, hour)
        return self.rate(meter, base_model, hour) if of_all is None else of_all

    def cost(self, meter: PricedQuantity, quantity: int, base_model: str | None, hour: datetime) -> Decimal | None:
        """Return what a quantity cost in that hour; None if it has no price. ``quantity``: tokens, or byte-hours."""
        rate = self.rate(meter, base_model, hour)
        return None if rate is None else cost_at(rate, meter, quantity)

    def known_cost(
        self, quantities: Mapping[PricedQuantity, int], base_model: str | None, hour: datetime
    ) -> tuple[Decimal, int]:
        """Return what the quantities that have a price cost together, and the number of tokens that have none."""
        costs = {meter: self.cost(meter, count, base_model, hour) for meter, count in quantities.items() if count}
        unpriced = sum(quantities[meter] for meter, cost in costs.items() if cost is None)
        return sum_of(cost for cost in costs.values() if cost is not None) or Decimal(0), unpriced

    def total(self, quantities: Mapping[PricedQuantity, int], base_model: str | None, hour: datetime) -> Decimal | None:
        """Return what all the quantities cost together; None if one of them has no price. Nothing costs nothing."""
        return sum_of(self.cost(meter, count, base_model, hour) for meter, count in quantities.items() if count)


def cost_at(rate: Decimal, meter: PricedQuantity, quantity: int) -> Decimal:
    """Return what a quantity costs at that price. ``quantity``: tokens, or byte-hours."""
    # Storage is by 720 hours, which no decimal divides exactly.
    return EXACT.divide(EXACT.multiply(rate, Decimal(quantity)), _UNITS[meter])


def _book(lines: Iterable[PriceLine]) -> _Book:
    book: dict[tuple[PricedQuantity, str | None], list[PriceLine]] = {}
    for line in lines:
        book.setdefault((line.meter, line.base_model), []).append(line)
    return book


def _rate(book: _Book, meter: PricedQuantity, base_model: str | None, hour: datetime) -> Decimal | None:
    for base in (base_model, None):
        lines = book.get((meter, base), [])
        if place := bisect_right(lines, hour, key=lambda line: line.valid_from):
            return lines[place - 1].amount
    return (
        _rate(book, PricedQuantity.PROMPT_TOKENS, base_model, hour)
        if meter is PricedQuantity.CACHED_PROMPT_TOKENS
        else None
    )


def sum_of(costs: Iterable[Decimal | None]) -> Decimal | None:
    """Return the sum; None if one of the costs is unknown."""
    total = Decimal(0)
    for cost in costs:
        if cost is None:
            return None
        total = EXACT.add(total, cost)
    return total


def cost_text(cost: Decimal | None) -> str | None:
    """Return a cost as text: exact for tokens, to 16 places for storage."""
    if cost is None:
        return None
    places = cost.quantize(Decimal(1).scaleb(-_COST_PLACES), context=EXACT)
    return f"{places.normalize(EXACT):f}"


async def tariff(session: AsyncSession, tenant: TenantId | None = None) -> Tariff:
    """Return the prices of the service, with the tenant's own before them."""
    lines = [_line(row) for row in await session.execute(_lines(Price))]
    if tenant is None:
        return Tariff(lines)
    own = _lines(TenantPrice).where(TenantPrice.tenant_id == tenant)
    return Tariff(lines, [_line(row) for row in await session.execute(own)])


async def tariffs(
    session: AsyncSession, tenants: Collection[TenantId], base_models: Collection[str]
) -> dict[TenantId, Tariff]:
    """Return each tenant's prices of those base models."""
    bases = few_lengths(sorted({*base_models, ANY_BASE}))
    lines = [_line(row) for row in await session.execute(_lines(Price).where(Price.base_model.in_(bases)))]
    owns = _lines(TenantPrice).add_columns(TenantPrice.tenant_id)
    owns = owns.where(TenantPrice.tenant_id.in_(few_lengths(sorted(tenants))), TenantPrice.base_model.in_(bases))
    own: dict[str, list[PriceLine]] = {}
    for row in await session.execute(owns):
        own.setdefault(row.tenant_id, []).append(_line(row))
    return {tenant: Tariff(lines, own.get(tenant, ())) for tenant in tenants}


async def currency_of(session: AsyncSession) -> str | None:
    """Return the currency of all prices, None without any."""
    either = union_all(select(Price.currency), select(TenantPrice.currency)).limit(1)
    found: str | None = await session.scalar(either)
    return found


def _lines(table: type[Price] | type[TenantPrice]) -> Select[Any]:
    """Return the query for prices in the order of their additions.

    A meter that only a newer version knows is left out: this version counts nothing by it, so nothing of it has a cost.
    """
    columns: tuple[Any, ...] = (table.base_model, table.meter, table.amount, table.currency, table.valid_from)
    return select(*columns).where(table.meter.in_([*PricedQuantity])).order_by(table.id)


def _line(row: Any) -> PriceLine:
    return PriceLine(row.base_model or None, PricedQuantity(row.meter), row.amount, row.currency, row.valid_from)
