"""A sample that cannot run says why at each poll, and every pause ends by itself."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import event, update
from weft_client.asynchronous import AsyncWeft

from contracts.paths import Segment
from contracts.waiting import WaitReason
from ledger.inspection import OperationFilter, list_operations
from store.settings import Settings
from store.tables import Operation, PoolState, WorkerProcess
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
    state, found = await told(cats, request_id)
    assert (state, "its turn" in found) == ("active", True)
    mine = await sampler(cats)
    other = (await ask(cats, mine, 1)).json()["request_id"]
    async with service.database.write() as transaction:
        await transaction.execute(update(Operation).where(Operation.id == request_id).values(taken_by="pool-1"))
    waiting = [
        (await cats.http.get(f"{service.url}/api/weft/v1/requests/{one}/waiting")).json() for one in (request_id, other)
    ]
    assert [one["reason"] for one in waiting] == [WaitReason.CLAIMED, WaitReason.TURN]
    assert "a sampling process has it" in (await told(cats, request_id))[1]


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
    assert "is paused (keep) until" in reason
    assert reason.endswith(": eval")
    assert (await told(dogs, theirs))[0] == "active"
    # Nobody asked how long: the default ends it.
    service.clock.move(minutes=6)
    assert (await told(cats, mine))[0] == "active"
    refused = await cats.http.post(f"/adapters/{run}/pause", json={"ttl_seconds": 3601})
    assert refused.status_code == 400
    assert "at most 3600" in refused.text


async def test_a_sample_of_anothers_published_checkpoint_tells_nothing_of_its_owners_pause(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await pool(service, PoolState.WORKING)
    run = await cats.run()
    await cats.checkpoint(run, "one", segment=Segment.SAMPLER_WEIGHTS)
    published = await cats.http.post(f"/training_runs/{run}/checkpoints/sampler_weights/one/publish")
    assert published.status_code == 204, published.text
    paused = await cats.http.post(f"/adapters/{run}/pause", json={"reason": "a secret", "timeout_seconds": 0})
    assert paused.status_code == 200, paused.text
    asked = {}
    for tenant in (cats, dogs):
        body = {
            "session_id": await tenant.session(),
            "sampling_session_seq_id": 0,
            "model_path": f"tinker://{run}/sampler_weights/one",
        }
        made = await tenant.http.post("/create_sampling_session", json=body)
        asked[tenant.id] = (await ask(tenant, made.json()["sampling_session_id"], 0)).json()["request_id"]
    state, reason = await told(dogs, asked[dogs.id])
    assert (state, "secret" in reason, run in reason) == ("active", False, False)
    weft = AsyncWeft(service.url, dogs.key)
    found = await weft.samples.waiting(asked[dogs.id])
    await weft.close()
    assert (found.reason, found.until) == ("turn", None)
    # The operator is told what holds each: the owner's sample is behind the gate, the other tenant's is not.
    async with service.database.read() as session:
        listed = await list_operations(session, OperationFilter(), most=10, waits=service.services.waits)
    assert {one.id: one.wait and one.wait.reason for one in listed} == {
        asked[cats.id]: WaitReason.GATE_PAUSED,
        asked[dogs.id]: WaitReason.TURN,
    }
    assert (await told(cats, asked[cats.id]))[1].endswith("a secret")


async def test_a_full_pool_tells_nothing_exact_of_a_neighbours_queue_and_sums_it_once_a_second(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await pool(service, PoolState.WORKING)
    mine, theirs = await sampler(cats), await sampler(dogs)
    sent = [(await ask(dogs, theirs, seq_id, max_tokens=50)).json()["request_id"] for seq_id in range(6)]
    async with service.database.write() as transaction:
        await transaction.execute(update(WorkerProcess).values(capacity=1))
        await transaction.execute(update(Operation).where(Operation.id == sent[0]).values(taken_by="pool-1"))
    asked = [(await ask(cats, mine, seq_id)).json()["request_id"] for seq_id in range(8)]
    statements: list[str] = []
    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    weft = AsyncWeft(service.url, cats.key)
    found = await asyncio.gather(*(weft.samples.waiting(one) for one in asked))
    assert {(one.reason, any(digit in (one.text or "") for digit in "0123456789")) for one in found} == {
        ("no_room", False)
    }
    # Five wait, each of 2 + 50 tokens.
    told_of_others = {(one.ahead.other_operations, one.ahead.other_tokens) for one in found if one.ahead is not None}
    assert told_of_others == {(8, 512)}
    assert sorted(one.ahead.own_operations for one in found if one.ahead is not None) == list(range(8))
    of_all = [one for one in statements if "GROUP BY operations.tenant_id" in one and "operations.position" not in one]
    assert len(of_all) == 1
    # A second later the sums are read anew.
    service.clock.move(seconds=1)
    async with service.database.write() as transaction:
        await transaction.execute(update(Operation).where(Operation.id.in_(sent)).values(taken_by="pool-1"))
    later = (await weft.samples.waiting(asked[0])).ahead
    await weft.close()
    assert later is not None
    assert (later.other_operations, later.other_tokens) == (0, 0)
