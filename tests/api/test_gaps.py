"""A seq_id that does not come is waited for, and told of; once its model is quiet for long the ones behind it run."""

from datetime import timedelta
from typing import Any

import pytest

from contracts.operations import OptimStepped
from ledger.gaps import close_gaps
from store.settings import Settings
from tests.api.conftest import Service, Tenant

GRACE = timedelta(minutes=15)


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Polls are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


async def step(tenant: Tenant, run: str, seq_id: int) -> str:
    """The request id of one more optimizer step."""
    answer = await tenant.http.post("/optim_step", json={"model_id": run, "seq_id": seq_id})
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["request_id"]
    return found


async def retrieve(tenant: Tenant, request_id: str) -> dict[str, Any]:
    """The outcome of a request, or why it waits."""
    found: dict[str, Any] = (await tenant.http.post("/retrieve_future", json={"request_id": request_id})).json()
    return found


async def closed(service: Service) -> int:
    """The number of runs whose gap was closed now."""
    async with service.database.write() as transaction:
        now = service.clock()
        return await close_gaps(transaction, service.wakeups, quiet_since=now - GRACE, now=now)


async def test_requests_behind_a_gap_are_told_and_run_once_it_is_old(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine, theirs, whole = await cats.run(), await dogs.run(), await dogs.run()
    first, waiting = await step(cats, mine, 3), await step(dogs, theirs, 2)
    plain = await step(dogs, whole, 1)
    told = await retrieve(cats, first)
    assert told["queue_state"] == "paused_capacity"
    assert "seq_id 1 of this model has not come" in told["queue_state_reason"]
    assert "no trainer" in (await retrieve(dogs, plain))["queue_state_reason"]
    service.clock.move(minutes=14)
    second = await step(cats, mine, 4)
    service.clock.move(minutes=2)
    assert await closed(service) == 1, "a model that had a request just now still waits"
    service.clock.move(minutes=14)
    assert await closed(service) == 1
    assert await closed(service) == 0
    await service.run_next(OptimStepped({}))
    await service.run_next(OptimStepped({}))
    for tenant, request_id in ((cats, first), (cats, second), (dogs, waiting), (dogs, plain)):
        found = await retrieve(tenant, request_id)
        assert "error" not in found
        assert "metrics" in found
    late = await retrieve(cats, await step(cats, mine, 1))
    assert (late["category"], "did not come in time" in late["error"]) == ("user", True)


async def test_a_request_that_comes_in_time_closes_its_gap_itself(service: Service, cats: Tenant) -> None:
    run = await cats.run()
    behind = await step(cats, run, 2)
    service.clock.move(hours=1)
    missing = await step(cats, run, 1)
    assert await closed(service) == 0
    for _ in range(2):
        await service.run_next(OptimStepped({}))
    assert "metrics" in await retrieve(cats, missing)
    assert "metrics" in await retrieve(cats, behind)


async def test_a_wide_gap_is_closed_in_steps(service: Service, cats: Tenant) -> None:
    run = await cats.run()
    behind = await step(cats, run, 200)
    service.clock.move(hours=1)
    assert [await closed(service) for _ in range(5)] == [1, 1, 1, 1, 0]
    await service.run_next(OptimStepped({}))
    assert "metrics" in await retrieve(cats, behind)
