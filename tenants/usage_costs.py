"""Costs of usage: each line's quantities at the prices of the hours in which they were used."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from sqlalchemy import case, literal, literal_column, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.database import Database
from tenants.metered_operations import SUMS
from tenants.prices import PricedQuantity, Tariff, sum_of, tariff, tariffs
from tenants.reach import Owner, tenant_of
from tenants.usage_hours import (
    BucketWidth,
    Dimension,
    UsageLine,
    UsageRows,
    key_of,
    place_of,
    usage_lines,
    usage_of_tenants,
)

_LENGTHS = {BucketWidth.HOUR: timedelta(hours=1), BucketWidth.DAY: timedelta(days=1)}
_PAGE = 5_000
_MOST_DAYS = 100_000
_Key = tuple[object, ...]


def quantities(sums: Mapping[str, int]) -> dict[PricedQuantity, int]:
    """Return what a line's sums come to by meter."""
    sampled = of_sample(sums["prompt_tokens"], sums["cached_prompt_tokens"], sums["sampled_tokens"])
    return {PricedQuantity.TRAIN_TOKENS: sums["train_tokens"], **sampled}


def of_sample(prompt: int, cached: int, drawn: int) -> dict[PricedQuantity, int]:
    """Return the tokens of samples by meter; ``prompt`` are all of their prompts, those from a cache too."""
    return {
        PricedQuantity.PROMPT_TOKENS: prompt - cached,
        PricedQuantity.CACHED_PROMPT_TOKENS: cached,
        PricedQuantity.SAMPLED_TOKENS: drawn,
    }


def sums_of(line: UsageLine) -> dict[str, int]:
    """Return the sums of a line by their names."""
    return {name: getattr(line, name) for name in SUMS}


@dataclass(frozen=True, slots=True)
class PricedLine:
    """A line of usage and its cost, None if some of its tokens have no price."""

    line: UsageLine
    cost: Decimal | None


@dataclass(frozen=True, slots=True)
class KnownCost:
    """Cost of what has a price, and the number of tokens that have none."""

    cost: Decimal
    unpriced: int


async def costs_of_tenants(
    session: AsyncSession, tenants: Collection[TenantId], *, since: datetime, before: datetime
) -> dict[TenantId, KnownCost]:
    """Return what was used in the hours that begin from ``since`` on and before ``before`` cost each tenant that used some."""
    used = await usage_of_tenants(session, tenants, since=since, before=before)
    bases = {line.base_model for lines in used.values() for line in lines if line.base_model is not None}
    prices = await tariffs(session, used, bases)
    found = {}
    for tenant, lines in used.items():
        parts = [prices[tenant].known_cost(quantities(sums_of(line)), line.base_model, line.start) for line in lines]
        cost = sum_of(cost for cost, _ in parts) or Decimal(0)
        found[tenant] = KnownCost(cost, sum(unpriced for _, unpriced in parts))
    return found


async def priced(
    session: AsyncSession,
    owner: Owner,
    lines: Sequence[UsageLine],
    *,
    since: datetime,
    before: datetime,
    by: Collection[Dimension],
    width: BucketWidth,
) -> tuple[str | None, list[PricedLine]]:
    """Return the currency, and ``lines`` with their costs: a page of ``usage_lines`` with the same arguments.

    What has been used since the page was read is in both. Without any price nothing is read but that.
    """
    prices = await tariff(session, tenant_of(owner))
    if prices.currency is None or not lines:
        return prices.currency, [PricedLine(line, None) for line in lines]
    found: dict[_Key, list[tuple[dict[str, int], Decimal | None]]] = {}
    for key, sums, cost in await _parts(session, owner, prices, lines, since, before, by, width):
        found.setdefault(key, []).append((sums, cost))
    return prices.currency, [_joined(line, found.get(key_of(line, by), [])) for line in lines]


@dataclass(frozen=True, slots=True)
class UsagePage:
    """A page of usage. ``last`` is its last line if another page comes behind it."""

    lines: list[PricedLine]
    currency: str | None
    last: UsageLine | None


async def priced_page(
    session: AsyncSession,
    owner: Owner,
    *,
    since: datetime,
    before: datetime | None,
    by: Collection[Dimension],
    width: BucketWidth,
    limit: int,
    offset: int = 0,
    after: UsageLine | None = None,
) -> UsagePage:
    """Return ``limit`` lines of ``usage_lines`` with their costs, up to now without ``before``."""
    end = before or datetime.max.replace(tzinfo=UTC)
    found = await usage_lines(
        session, owner, since=since, before=end, by=by, width=width, limit=limit + 1, offset=offset, after=after
    )
    shown = found[:limit]
    currency, lines = await priced(session, owner, shown, since=since, before=end, by=by, width=width)
    return UsagePage(lines, currency, shown[-1] if len(found) > limit else None)


async def priced_pages(
    database: Database,
    owner: Owner,
    *,
    since: datetime,
    before: datetime,
    by: Collection[Dimension],
    width: BucketWidth,
    most: int = _PAGE,
) -> AsyncIterator[list[PricedLine]]:
    """Yield all lines of ``usage_lines`` with their costs, page by page. No connection is held while a page is used.

    Days are read one by one, so that a page adds up no more than its day.
    """
    async with database.survey() as session:
        found = await usage_lines(
            session, owner, since=since, before=before, by=(), width=BucketWidth.DAY, limit=_MOST_DAYS
        )
    for day in [line.start for line in found]:
        begin, end = max(since, day), min(before, day + timedelta(days=1))
        last: UsageLine | None = None
        is_more = True
        while is_more:
            async with database.survey() as session:
                page = await usage_lines(
                    session, owner, since=begin, before=end, by=by, width=width, limit=most, after=last
                )
                _, lines = await priced(session, owner, page, since=begin, before=end, by=by, width=width)
            yield lines
            is_more = len(page) == most
            last = page[-1] if page else None


def _joined(line: UsageLine, parts: Sequence[tuple[dict[str, int], Decimal | None]]) -> PricedLine:
    if not parts:
        # The session has moved to another project since the page was read.
        return PricedLine(line, None)
    sums = {name: sum(part[name] for part, _ in parts) for name in SUMS}
    now = replace(
        line,
        operations=sums["operations"],
        failed=sums["failed"],
        train_tokens=sums["train_tokens"],
        prompt_tokens=sums["prompt_tokens"],
        cached_prompt_tokens=sums["cached_prompt_tokens"],
        sampled_tokens=sums["sampled_tokens"],
    )
    return PricedLine(now, sum_of(cost for _, cost in parts))


async def _parts(
    session: AsyncSession,
    owner: Owner,
    prices: Tariff,
    lines: Sequence[UsageLine],
    since: datetime,
    before: datetime,
    by: Collection[Dimension],
    width: BucketWidth,
) -> list[tuple[_Key, dict[str, int], Decimal | None]]:
    """Return the parts of lines in which every meter has one price, each with its line's key, its sums and its cost."""
    # A day of which the window has a part has only that part's usage.
    first, last = max(since, lines[0].start), min(before, lines[-1].start + _LENGTHS[width])
    rows = UsageRows(session.get_bind().dialect.name, owner, since=first, before=last)
    changes = prices.changes(first, last)
    hour = rows.start(BucketWidth.HOUR)
    # The number of prices that had begun: a line is split where one begins.
    steps = [(hour >= begin, literal(number + 1)) for number, begin in reversed(list(enumerate(changes)))]
    keys = rows.keys(by, width)
    columns = [*keys, rows.dimension(Dimension.BASE_MODEL), case(*steps, else_=literal(0)) if steps else literal(0)]
    query = (
        rows.query(
            *(column.label(f"key_{number}") for number, column in enumerate(columns)),
            *(rows.sum(name) for name in SUMS),
        )
        .where(tuple_(*keys) >= place_of(keys, lines[0], by), tuple_(*keys) <= place_of(keys, lines[-1], by))
        .group_by(*(literal_column(str(number + 1)) for number in range(len(columns))))
    )
    begins = [first, *changes]
    found: list[tuple[_Key, dict[str, int], Decimal | None]] = []
    for row in await session.execute(query):
        *key, base_model, period = row[: len(columns)]
        sums = {name: int(getattr(row, name)) for name in SUMS}
        found.append((tuple(key), sums, prices.total(quantities(sums), base_model, begins[period])))
    return found
