"""Prices: a cost is a quantity at the price of its hour, exactly, and no past cost ever changes."""

import asyncio
import csv
import io
from datetime import datetime, timedelta
from decimal import Decimal, localcontext
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import InvalidRequest
from store.tables.prices import Amount, Price
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity, PriceLine, Tariff, cost_text, tariff
from tenants.usage_costs import PricedLine, priced, priced_page, priced_pages
from tenants.usage_documents import Document, header, lines
from tenants.usage_exports import UsageRecord, final_before, usage_records
from tenants.usage_hours import BucketWidth, Dimension
from tests.tenants.usage_books import NOON, Books

HOUR = timedelta(hours=1)
MIDNIGHT = NOON.replace(hour=0)
WINDOW = {"since": NOON - timedelta(days=1), "before": NOON + timedelta(days=1)}
"""Window of the books' lines."""
RATES = {
    PricedQuantity.TRAIN_TOKENS: "3",
    PricedQuantity.PROMPT_TOKENS: "0.6",
    PricedQuantity.CACHED_PROMPT_TOKENS: "0.06",
    PricedQuantity.SAMPLED_TOKENS: "1.5",
}


async def price(
    books: Books, meter: PricedQuantity, amount: str, *, since=MIDNIGHT, base: str | None = None, now=MIDNIGHT, **more
) -> None:
    async with books.database.write() as transaction:
        new = NewPrice(meter, amount, more.get("currency", "USD"), base, since, more.get("tenant"))
        await add_price(transaction, new, lambda: now)


async def costs(books: Books, who: int, *by: Dimension, width=BucketWidth.DAY) -> list[PricedLine]:
    lines = await books.lines(who, *by, width=width)
    async with books.database.read() as session:
        currency, found = await priced(session, books.tenants[who], lines, **WINDOW, by=by, width=width)
    assert currency in (None, "USD")
    return found


async def test_a_price_that_begins_at_noon_splits_the_day_exactly(books: Books) -> None:
    for meter, amount in RATES.items():
        await price(books, meter, amount)
    await price(books, PricedQuantity.TRAIN_TOKENS, "30", since=NOON)
    for at in (NOON - HOUR, NOON - timedelta(microseconds=1), NOON, NOON + HOUR):
        await books.ended(0, at)
    await books.sampled(0, NOON)
    await books.ended(1, NOON, tokens=10**15)
    train = 2 * 10 * Decimal("0.000003") + 2 * 10 * Decimal("0.00003")
    sample = (2 * Decimal("0.6") + 4 * Decimal("0.06") + 5 * Decimal("1.5")) / 10**6
    for until in (NOON - HOUR, NOON + timedelta(minutes=1), NOON + 2 * HOUR):
        await books.prune(until)
        (day,) = await costs(books, 0)
        assert day.cost == train + sample
        for by in ((), (Dimension.KIND,), (Dimension.KEY, Dimension.RUN), tuple(Dimension)):
            for width in BucketWidth:
                found = await costs(books, 0, *by, width=width)
                assert sum(one.cost or Decimal(0) for one in found) == train + sample
    assert [one.cost for one in await costs(books, 1)] == [10**15 * Decimal("0.00003")]


@pytest.mark.parametrize("is_priced", [False, True], ids=["no price", "priced"])
async def test_a_window_within_a_day_has_its_hours_alone_whatever_has_a_price(books: Books, is_priced: bool) -> None:
    """Bounds on and between hours, of the day's line and of its pages: the same usage, and what it cost."""
    if is_priced:
        await price(books, PricedQuantity.TRAIN_TOKENS, "1")
        await price(books, PricedQuantity.TRAIN_TOKENS, "2", since=NOON)
        await price(books, PricedQuantity.TRAIN_TOKENS, "5", since=NOON + 3 * HOUR)
    for hours in range(-6, 7):
        await books.ended(0, NOON + hours * HOUR, tokens=2 ** (hours + 6))
        await books.ended(1, NOON + hours * HOUR, tokens=1000)
    half = timedelta(minutes=30)
    for since, before in ((-2, 2), (-3, -1), (1, 5), (-20, 0), (0, 20)):
        for begin, end in ((since * HOUR, before * HOUR), (since * HOUR - half, before * HOUR - half)):
            held = [hours for hours in range(-6, 7) if since <= hours < before]
            tokens = sum(2 ** (hours + 6) for hours in held)
            cost = sum(2 ** (hours + 6) * (5 if hours >= 3 else 2 if hours >= 0 else 1) for hours in held)
            window = {"since": NOON + begin, "before": NOON + end, "by": (), "width": BucketWidth.DAY}
            async with books.database.read() as session:
                pages = [(await priced_page(session, tenant, **window, limit=9)).lines for tenant in books.tenants]
            sent = [line async for page in priced_pages(books.database, books.tenants[0], **window) for line in page]
            assert sum(one.line.train_tokens for one in pages[0]) == tokens
            assert sum(one.line.train_tokens for one in pages[1]) == 1000 * len(held)
            assert sent == pages[0]
            costs = sum(one.cost or Decimal(0) for one in sent)
            assert costs == (Decimal(cost).scaleb(-6) if is_priced else 0)


async def test_usage_without_a_price_has_no_cost_and_a_bases_own_price_wins(books: Books) -> None:
    await books.ended(0, NOON)
    await books.sampled(0, NOON)
    assert [one.cost for one in await costs(books, 0)] == [None]
    await price(books, PricedQuantity.TRAIN_TOKENS, "1")
    assert [one.cost for one in await costs(books, 0)] == [None]
    by_kind = {one.line.kind: one.cost for one in await costs(books, 0, Dimension.KIND)}
    assert by_kind == {"forward_backward": Decimal("0.00001"), "sample": None}
    await price(books, PricedQuantity.TRAIN_TOKENS, "2", base="tiny")
    await price(books, PricedQuantity.TRAIN_TOKENS, "9", base="other")
    by_kind = {one.line.kind: one.cost for one in await costs(books, 0, Dimension.KIND)}
    assert by_kind["forward_backward"] == Decimal("0.00002")


async def test_a_cached_token_costs_a_prompts_price_unless_it_has_its_own(books: Books) -> None:
    await price(books, PricedQuantity.PROMPT_TOKENS, "1")
    await price(books, PricedQuantity.SAMPLED_TOKENS, "0")
    await books.sampled(0, NOON)
    assert [one.cost for one in await costs(books, 0)] == [Decimal("0.000006")]


@pytest.mark.parametrize(
    ("change", "told_as"),
    [
        ({"since": MIDNIGHT - HOUR}, "before the hour that runs"),
        ({"since": NOON + timedelta(minutes=1)}, "whole hour"),
        ({"amount": "-1"}, "0 or more"),
        ({"amount": "NaN"}, "0 or more"),
        ({"amount": "1e30"}, "below"),
        ({"amount": "0.00000000001"}, "decimal places"),
        ({"amount": "a"}, "decimal number"),
        ({"currency": "EUR"}, "one currency"),
        ({"currency": "usd"}, "capital letters"),
        ({"meter": PricedQuantity.STORAGE, "base": "tiny"}, "storage"),
        ({}, "has a price"),
    ],
)
async def test_a_price_that_would_change_the_past_or_is_none_is_refused(books: Books, change, told_as: str) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "1")
    wanted = {"meter": PricedQuantity.TRAIN_TOKENS, "amount": "2"} | change
    with pytest.raises(InvalidRequest, match=told_as):
        await price(books, wanted.pop("meter"), wanted.pop("amount"), **wanted)


async def test_prices_that_are_added_at_once_have_one_currency_and_each_hour_one_price(books: Books) -> None:
    """Find the first one when the second is added, of the service and of a tenant alike, and say so in its refusal."""
    for tenant in (None, books.tenants[0]):
        same = [price(books, PricedQuantity.TRAIN_TOKENS, amount, tenant=tenant) for amount in "12"]
        other = price(books, PricedQuantity.PROMPT_TOKENS, "1", currency="EUR", tenant=books.tenants[1])
        outcomes = await asyncio.gather(*same, other, return_exceptions=True)
        assert {type(one) for one in outcomes} == {type(None), InvalidRequest}, outcomes
    async with books.database.read() as session:
        prices = [await tariff(session, tenant) for tenant in books.tenants]
    assert len({line.currency for one in prices for line in (*one.lines, *one.own)}) == 1


@given(
    amount=st.decimals(min_value=0, max_value=10**9, places=10),
    counts=st.lists(st.integers(0, 10**15), min_size=1, max_size=20),
)
def test_costs_of_parts_add_up_to_the_cost_of_the_whole_to_the_last_digit(amount: Decimal, counts: list[int]) -> None:
    prices = Tariff([PriceLine(None, PricedQuantity.TRAIN_TOKENS, amount, "USD", MIDNIGHT)])
    parts = [prices.cost(PricedQuantity.TRAIN_TOKENS, count, "tiny", NOON) for count in counts]
    whole = prices.cost(PricedQuantity.TRAIN_TOKENS, sum(counts), "tiny", NOON)
    assert whole is not None
    with localcontext(prec=100):
        assert sum(Decimal(cost_text(part) or 0) for part in parts) == Decimal(cost_text(whole) or 0)


def test_money_is_never_a_float() -> None:
    for record in (PriceLine, PricedLine, UsageRecord):
        for name, hint in get_type_hints(record).items():
            assert "float" not in str(hint), f"{record.__name__}.{name}"
    assert isinstance(Price.__table__.c.amount.type, Amount)


async def test_an_export_of_hours_that_have_ended_is_the_same_each_time(books: Books) -> None:
    await price(books, PricedQuantity.TRAIN_TOKENS, "1")
    await books.ended(0, NOON)
    await books.sampled(0, NOON)
    await books.ended(0, NOON + HOUR)
    await books.ended(1, NOON)
    later = NOON + HOUR + timedelta(minutes=30)
    await books.metered(later)
    first = await exported(books, 0, later)
    assert {(one.meter, one.quantity) for one in first} == {
        (PricedQuantity.TRAIN_TOKENS, 10),
        (PricedQuantity.PROMPT_TOKENS, 2),
        (PricedQuantity.CACHED_PROMPT_TOKENS, 4),
        (PricedQuantity.SAMPLED_TOKENS, 5),
    }
    assert len({one.id for one in first}) == 4
    await price(books, PricedQuantity.TRAIN_TOKENS, "7", since=NOON + HOUR, now=later)
    await books.prune(later)
    assert await exported(books, 0, later) == first


async def exported(books: Books, who: int, now: datetime) -> list[UsageRecord]:
    """Return the records of an export that is made ``now``."""
    async with books.database.read() as session:
        final = await final_before(session, now)
    pages = usage_records(books.database, books.tenants[who], since=MIDNIGHT, before=min(now, final))
    return [record async for page in pages for record in page]


async def test_an_hour_is_exported_once_its_storage_was_read(books: Books) -> None:
    """Housekeeping may be late: an export that left out the storage would differ from the next one."""
    for who in (0, 1):
        await books.ended(who, NOON)
        await books.ended(who, NOON + HOUR)
    await books.stored(0, 7)
    await books.metered(NOON + HOUR)
    late, on_time = NOON + 4 * HOUR, NOON + HOUR + timedelta(minutes=5)
    assert [await exported(books, who, on_time) for who in (0, 1)] == [[], []]
    before = [await exported(books, who, late) for who in (0, 1)]
    assert [(one.meter, one.start) for one in before[0]] == [
        (PricedQuantity.TRAIN_TOKENS, NOON),
        (PricedQuantity.STORAGE, NOON),
    ]
    assert [(one.meter, one.start) for one in before[1]] == [(PricedQuantity.TRAIN_TOKENS, NOON)]
    await books.metered(late)
    for who in (0, 1):
        after = await exported(books, who, late)
        assert after[: len(before[who])] == before[who]
        assert {one.start for one in after} > {one.start for one in before[who]}


async def test_a_price_changes_no_byte_of_the_hours_before_it(books: Books) -> None:
    """Nor does the first one, with which the service gets its currency."""
    for who in (0, 1):
        await books.ended(who, NOON)
        await books.ended(who, NOON + HOUR)
    later = NOON + 2 * HOUR + timedelta(minutes=30)
    await books.metered(NOON + HOUR)
    before = {form: lines(form, await exported(books, 0, later)) for form in Document}
    await price(books, PricedQuantity.TRAIN_TOKENS, "1", since=NOON + HOUR, now=later - HOUR, currency="EUR")
    assert {form: lines(form, await exported(books, 0, later)) for form in Document} == before
    await books.metered(later)
    for who in (0, 1):
        told_as = [one["BillingCurrency"] for one in rows_of(await exported(books, who, later))]
        assert told_as == ["USD", "EUR"]


def rows_of(records: list[UsageRecord]) -> list[dict[str, str]]:
    """Return the records as rows of FOCUS."""
    return list(csv.DictReader(io.StringIO(header(Document.FOCUS) + lines(Document.FOCUS, records))))
