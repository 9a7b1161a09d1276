"""A clock that was ahead and is set back: what is to come is as far ahead as it was, for every tenant."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
import pytest_asyncio
from sqlalchemy import select, update

from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import ProcessKind, RateLineRow, ServicePresence, Webhook, WebhookEvent, WorkerProcess
from tenants.presence import note_interval, note_presence, was_present
from tenants.rates import Meter, Pace, charge, rate_states
from tenants.storage_hours import metered_to
from tests.tenants.usage_books import Books

TIMEOUT = timedelta(minutes=5)
MONTH = timedelta(days=30)
PACE = Pace(10.0, 10)
LITTLE, MUCH = 10, 100_000
LEASE = timedelta(minutes=20)
SLOW = timedelta(minutes=2)
"""Longest time that the test itself takes: PostgreSQL's clock goes on meanwhile."""


async def note(database: Database, now: datetime) -> None:
    async with database.write() as transaction:
        await note_presence(transaction, now=now, session_timeout=TIMEOUT)


async def write_leases(database: Database, until: dict[str, datetime]) -> None:
    """Have a process for each name whose lease ends then."""
    async with database.write() as transaction:
        for name, ends in until.items():
            lease = {"expires_at": ends, "started_at": ends, "kind": ProcessKind.TRAINER, "base_model": "base"}
            transaction.add(WorkerProcess(id=name, host="here", pid=1, **lease))


async def leases(database: Database) -> dict[str, datetime]:
    async with database.read() as session:
        return {row.id: row.expires_at for row in await session.scalars(select(WorkerProcess))}


@pytest.fixture
async def later(books: Books) -> datetime:
    """The time by the clock that is right again. Until then it was a month ahead, and everything went on."""
    begun, (cats, dogs) = utc_now(), books.tenants
    ahead = begun + MONTH
    await note(books.database, begun)
    await write_leases(books.database, {"alive": ahead + LEASE, "dead": ahead - LEASE})
    async with books.database.write() as transaction:
        for tenant, cost in ((cats, LITTLE), (dogs, MUCH)):
            await charge(transaction, tenant, Meter.TRAIN, PACE, cost=cost, now=ahead)
            line = {"tenant_id": tenant, "scope": "key", "scope_id": "1", "meter": "train", "burst": 10}
            worked_off = ahead.timestamp() + cost / PACE.per_second
            transaction.add(RateLineRow(**line, tat=worked_off, per_second=10.0, charged=cost, returned=0))
        hook = {"name": "hook", "url": "https://a.example", "events": [], "note": "", "secrets": [], "missed": 0}
        transaction.add(Webhook(id=1, tenant_id=cats, created_at=begun, rests_until=ahead, **hook))
        await transaction.flush()
        event = {"event_id": "e", "type": "t", "body": "", "attempts": 1, "created_at": ahead, "due_at": ahead}
        transaction.add(WebhookEvent(webhook_id=1, **event))
    await note(books.database, ahead)
    async with books.database.write() as transaction:
        await transaction.execute(update(ServicePresence).values(storage_metered_to=ahead))
    await note(books.database, utc_now())
    return utc_now()


async def test_a_rate_holds_what_is_owed_and_no_longer(books: Books, later: datetime) -> None:
    cats, dogs = books.tenants
    async with books.database.read() as session:
        states = await rate_states(session, [cats, dogs])
        lines = {
            row.tenant_id: row.tat for row in await session.execute(select(RateLineRow.tenant_id, RateLineRow.tat))
        }
    for tenant, owed in ((cats, LITTLE), (dogs, MUCH)):
        state, seconds = states[tenant, Meter.TRAIN], owed / PACE.per_second
        assert state.wait(state.charged, 1, later) == pytest.approx(seconds, abs=SLOW.total_seconds())
        assert lines[tenant] - later.timestamp() == pytest.approx(seconds, abs=SLOW.total_seconds())


async def test_a_lease_lasts_as_long_as_it_was_to(books: Books, later: datetime) -> None:
    found = await leases(books.database)
    assert abs(found["alive"] - (later + LEASE)) < SLOW
    assert later - SLOW < found["dead"] <= later


async def test_webhooks_and_the_meter_of_storage_go_on(books: Books, later: datetime) -> None:
    async with books.database.read() as session:
        due, rests = (
            await session.scalar(select(WebhookEvent.due_at)),
            await session.scalar(select(Webhook.rests_until)),
        )
        assert due is not None
        assert rests is not None
        assert max(due, rests) <= later
        assert await metered_to(session, later) <= later


async def test_silence_is_told_again_once_the_service_was_there_for_long_enough(books: Books, later: datetime) -> None:
    now = later
    async with books.database.read() as session:
        assert not await was_present(session, now=now, session_timeout=TIMEOUT)
    while now < later + TIMEOUT:
        now += note_interval(TIMEOUT)
        await note(books.database, now)
    async with books.database.read() as session:
        assert await was_present(session, now=now, session_timeout=TIMEOUT)


@pytest_asyncio.fixture
async def cluster(migrated_postgres_url: str) -> AsyncIterator[Database]:
    """The database of several processes, whose own time tells."""
    database = Database(create_engine(migrated_postgres_url))
    yield database
    await database.close()


async def test_a_process_that_was_frozen_moves_nobodys_lease(cluster: Database) -> None:
    """Others have noted the presence since the thawed process read its clock."""
    now = utc_now()
    await note(cluster, now)
    await write_leases(cluster, {"alive": now + LEASE, "other": now + 2 * LEASE})
    before = await leases(cluster)
    await note(cluster, now - timedelta(minutes=10))
    assert await leases(cluster) == before
    async with cluster.read() as session:
        told = await session.scalar(select(ServicePresence.present_at))
    assert told is not None
    assert told >= now
