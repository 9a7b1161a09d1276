"""Usage by hour: every operation counts once, in its hour and under its names, before and after pruning."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest_asyncio
from sqlalchemy import insert, update

from contracts.errors import Cancelled
from contracts.ids import SessionId, TenantId
from contracts.ledger_records import OperationState
from ledger.pruning import prune
from store.database import Database, create_engine
from store.tables import Operation, Project, Session
from tenants.keys import create_tenant
from tenants.run_retention import forget_sessions
from tenants.sessions import NewSession, create_session
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
ALL = tuple(Dimension)


@dataclass
class Books:
    """Two tenants with a session each, and ways to end operations."""

    database: Database
    tenants: list[TenantId] = field(default_factory=list)
    sessions: list[SessionId] = field(default_factory=list)
    rows: int = 0

    async def ended(self, who: int, at: datetime, **columns: object) -> None:
        """Record an operation that ended ``at``; a pass of 10 tokens by default."""
        self.rows += 1
        row = {
            "id": f"operation-{self.rows}",
            "tenant_id": self.tenants[who],
            "lane": f"{self.sessions[who]}:train:0",
            "seq_id": self.rows,
            "kind": "forward_backward",
            "base_model": "tiny",
            "state": OperationState.DONE,
            "body_digest": b"",
            "tokens": 10,
            "created_at": at,
            "finished_at": at,
        }
        async with self.database.write() as transaction:
            await transaction.execute(insert(Operation), [row | columns])

    async def sampled(self, who: int, at: datetime, **columns: object) -> None:
        """Record a sample of 6 prompt tokens, 4 of them cached, and 5 drawn ones, for the key 7."""
        sample = {"lane": f"{self.sessions[who]}:sample:1", "kind": "sample", "key_id": 7}
        await self.ended(who, at, **sample | {"tokens": 11, "sampled_tokens": 5, "cached_tokens": 4} | columns)

    async def lines(self, who: int = 0, *by: Dimension, width: BucketWidth = BucketWidth.HOUR) -> list[UsageLine]:
        async with self.database.read() as session:
            day = timedelta(days=1)
            return await usage_lines(
                session, self.tenants[who], since=NOON - day, before=NOON + day, by=by, width=width, limit=100
            )

    async def prune(self, before: datetime) -> None:
        async with self.database.write() as transaction:
            await prune(transaction, finished_before=before, now=NOON)


@pytest_asyncio.fixture
async def books(database_url: str) -> AsyncIterator[Books]:
    made = Books(Database(create_engine(database_url)))
    async with made.database.write() as transaction:
        for name in ("cats", "dogs"):
            tenant = await create_tenant(transaction, name=name, clock=lambda: NOON)
            made.tenants.append(tenant)
            new = NewSession([], None, "raw", None, None)
            made.sessions.append(await create_session(transaction, tenant, new, lambda: NOON))
    yield made
    await made.database.close()


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
    totals = []
    for by in ((), (Dimension.KEY,), (Dimension.PROJECT, Dimension.SESSION), ALL):
        lines = await books.lines(0, *by)
        totals.append((sum(line.train_tokens for line in lines), sum(line.sampled_tokens for line in lines)))
    assert totals == [(60, 30)] * 4


async def test_a_failed_operation_is_counted_and_its_tokens_are_not(books: Books) -> None:
    await books.ended(0, NOON, state=OperationState.FAILED, error_code="engine_failure")
    await books.sampled(0, NOON, state=OperationState.FAILED, error_code=Cancelled.code)
    for _ in range(2):
        (line,) = await books.lines(0)
        assert (line.operations, line.failed, line.train_tokens) == (0, 2, 0)
        assert (line.prompt_tokens, line.sampled_tokens) == (6, 5), "a sample that was cancelled while it was drawn"
        await books.prune(NOON + timedelta(hours=1))


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
