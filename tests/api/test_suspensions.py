"""A suspended tenant's polls say why its work waits; a second tenant's do not."""

from datetime import timedelta

import pytest

from store.settings import Settings
from tenants.suspensions import resume_tenant, suspend_tenant


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=50)})


async def test_a_poll_tells_the_operators_reason_until_the_resume(cats, dogs) -> None:
    held, other = [await tenant.operation(await tenant.run()) for tenant in (cats, dogs)]
    async with cats.service.database.write() as transaction:
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=cats.service.clock())
    answer = await cats.http.post("/retrieve_future", json={"request_id": held})
    assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
    assert "unpaid" in answer.json()["queue_state_reason"]
    assert (await dogs.http.post("/retrieve_future", json={"request_id": other})).json()["queue_state"] == "active"
    async with cats.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats")
    assert (await cats.http.post("/retrieve_future", json={"request_id": held})).json()["queue_state"] == "active"
