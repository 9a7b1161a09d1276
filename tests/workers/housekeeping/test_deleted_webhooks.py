"""Webhooks that are deleted while events are told: whoever comes second finds none, and nobody else's work is lost."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.tables import Session
from tenants import sessions
from tenants.deletion import end_tenant
from tenants.webhooks import delete_webhook, get_webhook
from tests.workers.housekeeping.conftest import House
from tests.workers.housekeeping.test_webhooks import (
    Receiver,
    events_of,
    happen,
    place,
    receiver,
    send,
    tenant,
    webhook,
)
from workers.housekeeping.schedule import StepName
from workers.webhooks.sender import Outcome, WebhookSender

__all__ = ["place", "receiver"]

_WAITING = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")


async def hold_on(transaction: AsyncSession, house: House) -> None:
    """Wait, in the middle of a transaction, until another one waits for it. SQLite has one at a time anyway."""
    if house.database.has_one_service:
        return
    await transaction.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    async with asyncio.timeout(60):
        while True:
            async with house.database.read() as session:
                if await session.scalar(_WAITING):
                    return
            await asyncio.sleep(0.01)


async def sweep(house: House, step: StepName) -> None:
    (outcome,) = (await house.keeping.sweep([step], until_done=True)).values()
    if isinstance(outcome, BaseException):
        raise outcome


@pytest.mark.parametrize(
    ("step", "kind"), [(StepName.END_SESSIONS, "session.lost"), (StepName.TELL_EXPIRIES, "checkpoint.expiring")]
)
async def test_a_webhook_that_is_deleted_meanwhile_takes_no_other_tenants_work_along(
    either_house: House, step: StepName, kind: str
) -> None:
    """Sessions of two tenants end in one transaction, and notices of both are written in one step."""
    house = either_house
    (cats, mine, run), (dogs, theirs, beside) = await house.run("cats"), await house.run("dogs")
    for owner, one in ((cats, run), (dogs, beside)):
        await house.checkpoint(owner, one, "soon", ttl=86400)
    gone, kept = [await webhook(house, owner, "https://example.com/", kind) for owner in (cats, dogs)]
    await house.pass_time(house.runtime.settings.session_timeout + timedelta(minutes=1))
    async with house.database.write() as transaction:
        assert await delete_webhook(transaction, cats, gone.name)
        telling = asyncio.create_task(sweep(house, step))
        await hold_on(transaction, house)
    await telling
    assert [one.type for one in await events_of(house, kept)] == [kind]
    assert await events_of(house, gone) == []
    async with house.database.read() as session:
        ended = set(await session.scalars(select(Session.id).where(Session.ended_at.is_not(None))))
    assert ended == ({mine, theirs} if step is StepName.END_SESSIONS else set())


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_tenants_removal_beside_the_end_of_its_sessions_is_no_deadlock(
    either_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal begins when the other transaction has ended the sessions of both tenants, and is about to tell of them."""
    house = either_house
    (cats, _, _), (dogs, _, _) = await house.run("cats"), await house.run("dogs")
    _, kept = [await webhook(house, owner, "https://example.com/") for owner in (cats, dogs)]
    await house.pass_time(house.runtime.settings.session_timeout + timedelta(minutes=1))
    removing: list[asyncio.Task[int]] = []
    record_events = sessions.record_events

    async def remove() -> int:
        async with house.database.write() as transaction:
            return await end_tenant(transaction, cats, house.now, most=10)

    async def record_later(transaction: AsyncSession, *rest: Any) -> None:
        removing.append(asyncio.create_task(remove()))
        await hold_on(transaction, house)
        await record_events(transaction, *rest)

    monkeypatch.setattr(sessions, "record_events", record_later)
    await sweep(house, StepName.END_SESSIONS)
    # Its webhook.
    assert [await one for one in removing] == [1]
    assert [one.type for one in await events_of(house, kept)] == ["session.lost"]


@pytest.mark.parametrize("status", ["204 No Content", "500 Oops"])
async def test_a_deletion_beside_the_record_of_a_delivery_is_no_deadlock(
    place: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    """The deletion has locked the webhook when the answer of its receiver comes, and takes its events then."""
    receiver.answer = lambda body: status if body["subject"] == "mine" else "204 No Content"
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    gone, kept = [await webhook(place, owner, receiver.url) for owner in (cats, dogs)]
    await happen(place, cats, "mine")
    await happen(place, dogs, "theirs")
    deleting: list[asyncio.Task[Any]] = []
    is_locked, whole = asyncio.Event(), WebhookSender.send

    async def delete() -> Any:
        async with place.database.write() as transaction:
            await get_webhook(transaction, cats, gone.name, for_change=True)
            is_locked.set()
            await hold_on(transaction, place)
            return await delete_webhook(transaction, cats, gone.name)

    async def answered(self: WebhookSender, client: Any, owner: TenantId, *rest: Any) -> Outcome:
        outcome = await whole(self, client, owner, *rest)
        if owner == cats:
            deleting.append(asyncio.create_task(delete()))
            await is_locked.wait()
        return outcome

    monkeypatch.setattr(WebhookSender, "send", answered)
    await send(place)
    (deleted,) = await asyncio.gather(*deleting)
    assert deleted.id == gone.id
    assert await events_of(place, gone) == []
    assert [one.delivered_at for one in await events_of(place, kept)] == [place.now]
