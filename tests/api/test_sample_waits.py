"""A sample that cannot run says why at each poll, and every pause ends by itself."""

from datetime import timedelta

import pytest
from sqlalchemy import update

from contracts.paths import Segment
from store.settings import Settings
from store.tables import PoolState, WorkerProcess
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_back_pressure import ask, sampler


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(
        update={
            "poll_hold": timedelta(milliseconds=20),
            "pause_ttl": timedelta(minutes=5),
            "longest_pause": timedelta(hours=1),
        }
    )


async def pool(service: Service, state: PoolState) -> None:
    """Have one sampling process of the base, in this state."""
    async with service.database.write() as transaction:
        found = await transaction.execute(update(WorkerProcess).values(pool_state=state).returning(WorkerProcess.id))
        if found.first() is None:
            now = service.clock()
            transaction.add(
                WorkerProcess(
                    id="pool-1",
                    kind="pool",
                    base_model=BASE,
                    host="here",
                    pid=1,
                    started_at=now,
                    expires_at=now + timedelta(days=1),
                    pool_state=state,
                )
            )


async def told(tenant: Tenant, request_id: str) -> tuple[str, str]:
    """State and reason that a poll tells."""
    answer = await tenant.http.post("/retrieve_future", json={"request_id": request_id})
    assert answer.status_code == 408
    return answer.json()["queue_state"], answer.json().get("queue_state_reason", "")


async def test_a_sample_tells_that_no_replica_works_and_then_that_it_waits_for_its_turn(
    service: Service, cats: Tenant
) -> None:
    request_id = (await ask(cats, await sampler(cats), 0)).json()["request_id"]
    for state, reason in ((PoolState.NO_REPLICA, "answers"), (PoolState.DRAINED, "drained")):
        await pool(service, state)
        queue_state, found = await told(cats, request_id)
        assert queue_state == "paused_capacity"
        assert reason in found
    await pool(service, PoolState.WORKING)
    assert await told(cats, request_id) == ("active", "")


async def test_a_paused_adapters_sample_tells_the_pause_and_its_neighbours_does_not(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await pool(service, PoolState.WORKING)
    run = await cats.run()
    version = new_checkpoint_id()
    async with service.database.write() as transaction:
        new = NewCheckpoint(version, run, Segment.SAMPLER_WEIGHTS, "one", 1, None, True, None)
        await record_checkpoint(transaction, cats.id, new, service.clock)
    made = await cats.http.post(
        "/create_sampling_session",
        json={
            "session_id": await cats.session(),
            "sampling_session_seq_id": 0,
            "model_path": f"tinker://{run}/sampler_weights/one",
        },
    )
    mine = (await ask(cats, made.json()["sampling_session_id"], 0)).json()["request_id"]
    theirs = (await ask(dogs, await sampler(dogs), 0)).json()["request_id"]
    paused = await cats.http.post(f"/adapters/{run}/pause", json={"reason": "eval", "timeout_seconds": 0})
    assert paused.status_code == 200, paused.text
    queue_state, reason = await told(cats, mine)
    assert queue_state == "paused_capacity"
    assert "paused until" in reason
    assert reason.endswith(": eval")
    assert (await told(dogs, theirs))[0] == "active"
    # Nobody asked how long: the default ends it.
    service.clock.move(minutes=6)
    assert await told(cats, mine) == ("active", "")
    refused = await cats.http.post(f"/adapters/{run}/pause", json={"ttl_seconds": 3601})
    assert refused.status_code == 400
    assert "at most 3600" in refused.text
