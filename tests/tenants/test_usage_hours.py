"""Usage by hour: every operation counts once, in its hour and under its names, before and after pruning."""

import base64
import json
from datetime import timedelta
from itertools import combinations

import pytest
from sqlalchemy import select, update

from contracts.errors import Cancelled, InvalidRequest
from contracts.ledger_records import OperationState
from contracts.operations import LoraSettings
from store.tables import Operation, Project, Session, UsageHour
from tenants.metered_operations import SUMS
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.reach import Reach
from tenants.run_retention import forget_sessions
from tenants.runs import NewRun
from tenants.usage import tokens_since
from tenants.usage_costs import priced, priced_pages
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines, usage_of_tenants
from tenants.usage_places import line_before
from testing.runs import create_run
from tests.tenants.usage_books import NOON, Books

ALL = tuple(Dimension)
HOUR = timedelta(hours=1)


async def test_tokens_are_told_apart_and_of_the_tenant(books: Books) -> None:
    await books.ended(0, NOON)
    await books.sampled(0, NOON)
    await books.ended(1, NOON, tokens=1000)
    sampling, training = await books.lines(0, *ALL)
    assert (training.kind, training.train_tokens, training.prompt_tokens, training.key) == (
        "forward_backward",
        10,
        0,
        None,
    )
    assert training.run == f"{books.sessions[0]}:train:0"
    assert (sampling.kind, sampling.key, sampling.run, sampling.train_tokens) == ("sample", 7, None, 0)
    assert (sampling.prompt_tokens, sampling.cached_prompt_tokens, sampling.sampled_tokens) == (6, 4, 5)
    assert {training.session, sampling.session} == {books.sessions[0]}
    (theirs,) = await books.lines(1)
    assert (theirs.operations, theirs.train_tokens, theirs.session) == (1, 1000, None)


async def test_sums_are_the_same_before_and_after_pruning_at_a_border_of_hours(books: Books) -> None:
    tick = timedelta(microseconds=1)
    for at in (NOON - tick, NOON, NOON + timedelta(minutes=59, seconds=59), NOON + timedelta(hours=1)):
        await books.ended(0, at)
        await books.sampled(0, at)
    await books.ended(1, NOON)
    before = await books.lines(0, *ALL), await books.lines(1, *ALL)
    assert [line.start.hour for line in await books.lines(0)] == [11, 12, 13]
    assert [line.operations for line in await books.lines(0)] == [2, 4, 2]
    # In two goes, so that an hour is partly pruned.
    for until in (NOON + tick, NOON + timedelta(hours=2)):
        await books.prune(until)
        assert (await books.lines(0, *ALL), await books.lines(1, *ALL)) == before
    by_day = await books.lines(0, Dimension.KIND, width=BucketWidth.DAY)
    assert [(line.start.hour, line.kind, line.operations) for line in by_day] == [
        (0, "forward_backward", 4),
        (0, "sample", 4),
    ]


async def test_every_grouping_has_the_same_totals(books: Books) -> None:
    for minutes in range(0, 120, 20):
        await books.ended(0, NOON + timedelta(minutes=minutes))
        await books.sampled(0, NOON + timedelta(minutes=minutes), key_id=minutes)
    await books.prune(NOON + timedelta(minutes=50))
    groupings = [by for size in range(len(ALL) + 1) for by in combinations(ALL, size)]
    for by in groupings:
        for width in BucketWidth:
            lines = await books.lines(0, *by, width=width)
            assert [sum(getattr(line, name) for line in lines) for name in SUMS] == [12, 0, 60, 36, 24, 30], by
    assert len(groupings) == 64


async def test_pages_by_their_last_line_have_every_line_once_with_its_cost(books: Books) -> None:
    for hours in range(3):
        for key in (None, 7, 8):
            await books.sampled(0, NOON + timedelta(hours=9 * hours), key_id=key)
            await books.ended(0, NOON + timedelta(hours=9 * hours))
    await books.sampled(1, NOON)
    await books.prune(NOON + timedelta(hours=1))
    since, before = NOON - timedelta(days=1), NOON + timedelta(days=2)
    async with books.database.write() as transaction:
        for meter in PricedQuantity:
            await add_price(transaction, NewPrice(meter, "1", "USD"), lambda: since)
    for by in ((), (Dimension.KEY,), (Dimension.RUN, Dimension.KIND), ALL):
        for width in BucketWidth:
            window = {"since": since, "before": before, "by": by, "width": width}
            async with books.database.read() as session:
                whole = await usage_lines(session, books.tenants[0], **window, limit=100)
                _, expected = await priced(session, books.tenants[0], whole, **window)
                paged: list[UsageLine] = []
                while found := await usage_lines(
                    session, books.tenants[0], **window, limit=2, after=paged[-1] if paged else None
                ):
                    paged += found
            assert paged == whole
            pages = [page async for page in priced_pages(books.database, books.tenants[0], **window, most=2)]
            assert [line for page in pages for line in page] == expected
            assert max(map(len, pages)) <= 2
            assert None not in [line.cost for line in expected]


async def test_a_failed_operation_is_counted_and_its_tokens_are_not(books: Books) -> None:
    await books.ended(0, NOON, state=OperationState.FAILED, error_code="engine_failure")
    await books.sampled(0, NOON, state=OperationState.FAILED, error_code=Cancelled.code)
    for _ in range(2):
        (line,) = await books.lines(0)
        assert (line.operations, line.failed, line.train_tokens) == (0, 2, 0)
        assert (line.prompt_tokens, line.sampled_tokens) == (6, 5), "a sample that was cancelled while it was drawn"
        await books.prune(NOON + timedelta(hours=1))


async def test_a_cancelled_pass_counts_no_tokens_whatever_its_row_has(books: Books) -> None:
    """Rows of another version have what it would have used."""
    await books.ended(0, NOON, state=OperationState.FAILED, error_code=Cancelled.code, tokens=10**6)
    await books.ended(0, NOON)
    await books.ended(1, NOON, tokens=30)
    for _ in range(2):
        for who, (failed, tokens) in enumerate(((1, 10), (0, 30))):
            (line,) = await books.lines(who)
            assert (line.operations, line.failed, line.train_tokens) == (1, failed, tokens)
            async with books.database.read() as session:
                assert await tokens_since(session, books.tenants[who], NOON - HOUR) == tokens
        await books.prune(NOON + HOUR)


async def test_usage_follows_the_sessions_project_and_keeps_it_when_the_session_is_forgotten(books: Books) -> None:
    await books.sampled(0, NOON)
    await books.sampled(1, NOON)
    async with books.database.write() as transaction:
        transaction.add(Project(id="p-1", tenant_id=books.tenants[0], name="one", created_at=NOON))
        transaction.add(Project(id="p-2", tenant_id=books.tenants[0], name="two", created_at=NOON))
    for project in ("p-1", "p-2"):
        async with books.database.write() as transaction:
            await transaction.execute(update(Session).where(Session.id == books.sessions[0]).values(project=project))
        (line,) = await books.lines(0, Dimension.PROJECT)
        assert line.project == project
        await books.prune(NOON + timedelta(hours=1))
    async with books.database.write() as transaction:
        await transaction.execute(update(Operation).values(lane="gone"))
        await transaction.execute(update(Session).values(ended_at=NOON))
        await forget_sessions(transaction, before=NOON + timedelta(days=1), after=None, most=100)
    assert [line.project for line in await books.lines(0, Dimension.PROJECT)] == ["p-2"]
    assert [line.project for line in await books.lines(1, Dimension.PROJECT)] == [books.tenants[1]]


async def test_usage_of_an_ended_session_that_stays_follows_it_back_to_the_default_project(books: Books) -> None:
    """Write none of its hours anew, and tell under its own project those that an earlier version noted under another."""
    bounds = {"since": NOON - HOUR, "before": NOON + HOUR}
    for who, tenant in enumerate(books.tenants):
        await books.sampled(who, NOON)
        async with books.database.write() as transaction:
            transaction.add(Project(id=f"p-{who}", tenant_id=tenant, name="one", created_at=NOON))
            await transaction.flush()
            # Runs keep their sessions.
            new = NewRun(books.sessions[who], 0, "tiny", LoraSettings(rank=8, seed=1), None)
            await create_run(transaction, tenant, new, lambda: NOON)
            ended = update(Session).where(Session.id == books.sessions[who])
            await transaction.execute(ended.values(project=f"p-{who}", ended_at=NOON))
    await books.prune(NOON + HOUR)
    async with books.database.write() as transaction:
        assert (await forget_sessions(transaction, before=NOON + HOUR, after=None, most=100)).rows == 0
        assert set(await transaction.scalars(select(UsageHour.project))) == {None}
        # As another version noted it.
        await transaction.execute(update(UsageHour).values(project="p-0"))
        await transaction.execute(update(Session).where(Session.id == books.sessions[0]).values(project=None))
    for who, project in enumerate((books.tenants[0], "p-1")):
        assert [line.project for line in await books.lines(who, Dimension.PROJECT)] == [project]
        async with books.database.read() as session:
            found = await usage_of_tenants(session, [books.tenants[who]], **bounds)
            of_project = Reach(books.tenants[who], frozenset({f"p-{who}"}))
            seen = await usage_lines(session, of_project, **bounds, by=(), limit=9)
        assert [line.project for line in found[books.tenants[who]]] == [project]
        assert len(seen) == who


async def test_an_hour_belongs_to_one_window_whenever_it_is_pruned(books: Books) -> None:
    """Windows whose borders lie within hours: the hour goes to the one that has its beginning."""
    await books.ended(0, NOON + timedelta(minutes=10))
    await books.ended(0, NOON + timedelta(minutes=40))
    border = NOON + timedelta(minutes=30)
    for _ in range(2):
        async with books.database.read() as session:
            first, second = [
                await usage_lines(
                    session, books.tenants[0], since=since, before=since + timedelta(hours=1), by=(), limit=9
                )
                for since in (border - timedelta(hours=1), border)
            ]
        assert ([line.operations for line in first], second) == ([2], [])
        await books.prune(NOON + timedelta(hours=1))


@pytest.mark.parametrize("number", [2**31, 2**63 - 1])
async def test_a_cursor_with_a_number_that_no_key_can_have_is_refused(books: Books, number: int) -> None:
    """The largest one that a key can have is a place like any other, for either tenant."""
    by = {Dimension.KEY}

    def cursor(key: int) -> str:
        return base64.urlsafe_b64encode(json.dumps([(NOON - HOUR).isoformat(), key]).encode()).decode()

    for who in (0, 1):
        await books.ended(who, NOON, key_id=7)
    with pytest.raises(InvalidRequest, match="cursor"):
        line_before(cursor(number), by)
    async with books.database.read() as session:
        for tenant in books.tenants:
            place = line_before(cursor(2**31 - 1), by)
            bounds = {"since": NOON - HOUR, "before": NOON + HOUR}
            found = await usage_lines(session, tenant, **bounds, by=by, limit=10, after=place)
            assert [(line.key, line.operations) for line in found] == [(7, 1)]
