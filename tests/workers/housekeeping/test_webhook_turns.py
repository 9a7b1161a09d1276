"""Turns of webhooks at the places for deliveries: whoever was served longest ago is next."""

from collections.abc import Collection
from datetime import timedelta
from math import inf
from typing import Any

import pytest

from contracts.ids import TenantId
from store.settings import Settings
from tenants.limits import Limits
from tenants.webhooks import WebhookSpec, set_webhook
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
from workers.webhooks import delivery
from workers.webhooks.delivery import WebhookDelivery

__all__ = ["place", "receiver"]


async def test_a_free_place_goes_to_who_waits_and_not_to_whose_backlog_just_had_it(
    place: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two webhooks of one tenant have all places, and far more events than a batch, when a neighbour's event happens."""
    monkeypatch.setattr(delivery, "_MOST_WEBHOOKS", 2)
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    for name in ("one", "two"):
        await webhook(place, cats, receiver.url, name=name)
    theirs = await webhook(place, dogs, receiver.url)
    await happen(place, cats, *(str(number) for number in range(3 * delivery._MOST_EVENTS)))
    chosen: list[TenantId] = []
    whole = WebhookDelivery._choose

    async def choose(self: WebhookDelivery, sending: Collection[Any]) -> list[Any]:
        found = await whole(self, sending)
        if not chosen:
            place.now += timedelta(minutes=1)
            await happen(place, dogs, "theirs")
        chosen.extend(one.tenant for one in found)
        return found

    def answer(_: dict[str, Any]) -> str:
        place.now += timedelta(milliseconds=1)
        return "204 No Content"

    receiver.answer = answer
    monkeypatch.setattr(WebhookDelivery, "_choose", choose)
    await send(place)
    assert chosen[:3] == [cats, cats, dogs]
    assert [one.delivered_at is not None for one in await events_of(place, theirs)] == [True]
    assert len(receiver.got) == 2 * 3 * delivery._MOST_EVENTS + 1


async def test_a_webhook_that_is_switched_off_and_on_goes_behind_those_that_wait(
    place: House, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_MOST_WEBHOOKS", 1)
    cats, dogs = await tenant(place, "cats"), await tenant(place, "dogs")
    mine, theirs = await webhook(place, cats, receiver.url), await webhook(place, dogs, receiver.url)
    await happen(place, cats, *(str(number) for number in range(delivery._MOST_EVENTS + 1)))
    sending = WebhookDelivery(place.runtime)
    assert await sending._send_to(mine.id, inf) == delivery._MOST_EVENTS
    place.now += timedelta(minutes=1)
    await happen(place, dogs, "theirs")
    place.now += timedelta(minutes=1)
    for is_enabled in (False, True):
        async with place.database.write() as transaction:
            spec = WebhookSpec(is_enabled=is_enabled)
            defaults = Limits.of(Settings())
            await set_webhook(transaction, cats, mine.name, spec, networks=(), defaults=defaults, now=place.now)
    assert [one.id for one in await sending._choose([])] == [theirs.id]
