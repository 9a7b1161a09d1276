"""A clock that was ahead and is set back: what is to come is as far ahead as it was, for every tenant."""

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select, update

from store.tables import ProcessKind, RateLineRow, ServicePresence, Webhook, WebhookEvent, WorkerProcess
from tenants.presence import note_interval, note_presence, was_present
from tenants.rates import Meter, Pace, charge, rate_states
from tenants.storage_hours import metered_to
from tests.tenants.usage_books import NOON, Books

TIMEOUT = timedelta(minutes=5)
AHEAD = NOON + timedelta(days=30)
PACE = Pace(10.0, 10)
LEASE = timedelta(seconds=20)


@pytest.fixture
async def later(books: Books) -> datetime:
    """A minute after noon by the clock that is right again. Meanwhile it was a month ahead, and everything went on."""
    cats, dogs = books.tenants
    async with books.database.write() as transaction:
        await note_presence(transaction, now=NOON, session_timeout=TIMEOUT)
    async with books.database.write() as transaction:
        for tenant, cost in ((cats, 10), (dogs, 1000)):
            await charge(transaction, tenant, Meter.TRAIN, PACE, cost=cost, now=AHEAD)
            line = {"tenant_id": tenant, "scope": "key", "scope_id": "1", "meter": "train", "burst": 10}
            worked_off = AHEAD.timestamp() + cost / PACE.per_second
            transaction.add(RateLineRow(**line, tat=worked_off, per_second=10.0, charged=cost, returned=0))
        for name, left in (("alive", LEASE), ("dead", timedelta(minutes=-1))):
            lease = {"expires_at": AHEAD + left, "started_at": NOON, "kind": ProcessKind.TRAINER, "base_model": "base"}
            transaction.add(WorkerProcess(id=name, host="here", pid=1, **lease))
        hook = {"name": "hook", "url": "https://a.example", "events": [], "note": "", "secrets": [], "missed": 0}
        transaction.add(Webhook(id=1, tenant_id=cats, created_at=NOON, rests_until=AHEAD, **hook))
        await transaction.flush()
        event = {"event_id": "e", "type": "t", "body": "", "attempts": 1, "created_at": AHEAD, "due_at": AHEAD}
        transaction.add(WebhookEvent(webhook_id=1, **event))
        await note_presence(transaction, now=AHEAD, session_timeout=TIMEOUT)
        await transaction.execute(update(ServicePresence).values(storage_metered_to=AHEAD))
    found = NOON + timedelta(minutes=1)
    async with books.database.write() as transaction:
        await note_presence(transaction, now=found, session_timeout=TIMEOUT)
    return found


async def test_a_rate_holds_what_is_owed_and_no_longer(books: Books, later: datetime) -> None:
    cats, dogs = books.tenants
    async with books.database.read() as session:
        states = await rate_states(session, [cats, dogs])
        lines = {
            row.tenant_id: row.tat for row in await session.execute(select(RateLineRow.tenant_id, RateLineRow.tat))
        }
    waits = {
        tenant: states[tenant, Meter.TRAIN].wait(states[tenant, Meter.TRAIN].charged, 1, later)
        for tenant in books.tenants
    }
    assert waits[cats] == pytest.approx(0.1, abs=0.01)
    assert waits[dogs] == pytest.approx(99.1, abs=0.01)
    assert lines[cats] - later.timestamp() == pytest.approx(1.0, abs=0.01)
    assert lines[dogs] - later.timestamp() == pytest.approx(100.0, abs=0.01)


async def test_a_lease_lasts_as_long_as_it_was_to(books: Books, later: datetime) -> None:
    async with books.database.read() as session:
        leases = {row.id: row.expires_at for row in await session.scalars(select(WorkerProcess))}
    assert leases == {"alive": later + LEASE, "dead": later}


async def test_webhooks_and_the_meter_of_storage_go_on(books: Books, later: datetime) -> None:
    async with books.database.read() as session:
        assert await session.scalar(select(WebhookEvent.due_at)) == later
        assert await session.scalar(select(Webhook.rests_until)) == later
        assert await metered_to(session, later) == NOON


async def test_silence_is_told_again_once_the_service_was_there_for_long_enough(books: Books, later: datetime) -> None:
    now = later
    while now < later + TIMEOUT:
        async with books.database.write() as transaction:
            assert not await was_present(transaction, now=now, session_timeout=TIMEOUT)
            now += note_interval(TIMEOUT)
            await note_presence(transaction, now=now, session_timeout=TIMEOUT)
    async with books.database.read() as session:
        assert await was_present(session, now=now, session_timeout=TIMEOUT)
