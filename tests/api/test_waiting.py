"""Polls, weft's own routes and the SDK tell one reason for a wait; a second tenant beside has its own."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event, update
from weft_client.asynchronous import AsyncWeft
from weft_client.errors import BadRequest, NotThere

from contracts.ledger_records import Completion, NewOperation
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LossSpec, OperationKind, OptimStepped, TrainingBatch
from contracts.paths import Segment
from contracts.turn_bounds import Queue, own_tokens_before, passes_until_served
from store.settings import Settings
from store.tables import Run, WorkerProcess
from tenants.limits import set_tenant
from tenants.rights import SuspendMode
from tenants.suspensions import suspend_tenant
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_back_pressure import ask, sampler
from tests.conftest import ROOT
from tests.ledger_heads import TRAINER, ready_heads
from tests.payloads import digest, stored

POLLS = 1000
PASS_TOKENS = 1024


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=20)})


async def trainer(service: Service, run: str, name: str = TRAINER) -> None:
    """Have a trainer of the base, which is heard of now and has the run."""
    now = service.clock()
    ends = now + service.services.runtime.settings.lease
    row = WorkerProcess(id=name, kind="trainer", base_model=BASE, host="here", pid=1, started_at=now, expires_at=ends)
    row.capacity = PASS_TOKENS
    async with service.database.write() as transaction:
        await transaction.merge(row)
        await transaction.flush()
        await transaction.execute(update(Run).where(Run.id == run).values(trainer_id=name, lease_token=1))


async def told(tenant: Tenant, request_id: str) -> tuple[str, str]:
    """State and reason that a poll tells."""
    answer = await tenant.http.post("/retrieve_future", json={"request_id": request_id})
    assert answer.status_code == 408, answer.text
    return answer.json()["queue_state"], answer.json().get("queue_state_reason", "")


@pytest_asyncio.fixture
async def clients(service: Service, cats: Tenant, dogs: Tenant) -> AsyncIterator[tuple[AsyncWeft, AsyncWeft]]:
    """Clients of the two tenants."""
    both = AsyncWeft(service.url, cats.key), AsyncWeft(service.url, dogs.key)
    yield both
    for one in both:
        await one.close()


async def test_a_missing_number_is_named_and_the_neighbour_waits_for_its_turn(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    for run in (mine, theirs):
        await trainer(service, run)
    behind, plain = await cats.operation(mine, seq_id=3), await dogs.operation(theirs)
    state, text = await told(cats, behind)
    found = await clients[0].runs.waiting(mine)
    assert (state, found.reason, found.seq_id, found.request_id) == ("paused_capacity", "missing_seq_id", 1, behind)
    assert text == found.text == (await clients[0].samples.waiting(behind)).text
    assert (await told(dogs, plain))[0] == "active"
    beside = await clients[1].runs.waiting(theirs)
    assert (beside.reason, beside.request_id) == ("turn", plain)
    assert beside.ahead is not None
    assert "cats" not in beside.model_dump_json()
    assert mine not in beside.model_dump_json()
    await service.run_next(OptimStepped({}))
    assert (await clients[1].runs.waiting(theirs)).reason is None
    assert (await clients[1].samples.waiting(plain)).reason is None


async def test_an_operation_behind_another_tells_what_that_one_waits_for(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    run, beside = await cats.run(), await dogs.run()
    for one in (run, beside):
        await trainer(service, one)
    first, behind = await cats.operation(run, 1), await cats.operation(run, 2)
    theirs = await dogs.operation(beside)
    # The trainer is not heard of: it misses its renewals, and its lease decides.
    lease = service.services.runtime.settings.lease
    service.clock.move(seconds=lease.total_seconds() * 0.75)
    state, text = await told(cats, behind)
    assert state == "paused_capacity"
    found = await clients[0].samples.waiting(behind)
    assert (found.reason, found.cause, found.seq_id) == ("earlier_operation", "trainer_lost", 1)
    assert text == found.text
    assert (await clients[0].samples.waiting(first)).until is not None
    # Another trainer has the second tenant's run.
    await trainer(service, beside, "trainer-2")
    assert (await told(dogs, theirs))[0] == "active"


async def test_a_held_tenant_is_told_the_operators_reason(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    runs = [await cats.run(), await dogs.run()]
    for run in runs:
        await trainer(service, run)
    mine, theirs = await cats.operation(runs[0]), await dogs.operation(runs[1])
    async with service.database.write() as transaction:
        now = service.clock()
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=now, mode=SuspendMode.HOLD)
    assert (await told(cats, mine))[1].endswith("unpaid")
    found = await clients[0].runs.waiting(runs[0])
    assert (found.reason, found.since) == ("held", now)
    assert (await told(dogs, theirs))[0] == "active"
    assert (await clients[1].runs.waiting(runs[1])).reason == "turn"


async def test_an_estimate_comes_from_what_has_ended_meanwhile_and_tells_sums_only(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    mine, theirs = await cats.run(), await dogs.run()
    for run in (mine, theirs):
        await trainer(service, run)
    payload = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])
    kind, stored_payload = OperationKind.FORWARD, stored(payload)

    async def send(tenant: Tenant, run: str, seq_id: int) -> None:
        new = NewOperation(tenant.id, run, seq_id, kind, BASE, stored_payload, digest(payload), 100, TRAINER)
        async with service.database.write() as transaction:
            await service.ledger.accept(transaction, new)

    await send(cats, mine, 1)
    for seq_id in range(1, 6):
        await send(dogs, theirs, seq_id)
    ahead = (await clients[0].runs.waiting(mine)).ahead
    assert ahead is not None
    assert (ahead.own_tokens, ahead.other_operations, ahead.other_tokens) == (100, 8, 512)
    assert (ahead.bound_passes, ahead.eta_seconds) == (
        passes_until_served(Queue(1.0, [1.0], 100, 128), PASS_TOKENS),
        None,
    )
    for _ in range(2):
        service.clock.move(seconds=10)
        async with service.database.read() as session:
            ready = [one for one in await ready_heads(service.ledger, session, BASE) if one.tenant == dogs.id]
        async with service.database.write() as transaction:
            output = ForwardBackwardOutput([], {})
            await service.ledger.complete(transaction, [Completion(one, output) for one in ready])
        await trainer(service, mine)
    later = (await clients[0].runs.waiting(mine)).ahead
    assert later is not None
    # 100 tokens in 10 s. All that waits fits into one pass, at whose end its own 100 are done; the other's 300 are rounded to
    # 512, which counts as three quarters of it.
    assert (later.other_tokens, later.tokens_per_second, later.eta_seconds) == (512, 10.0, 48.4)


async def test_what_is_before_a_run_follows_the_weights_of_its_tenants_runs_and_no_others(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    light, heavy, beside = await cats.run(), await cats.run(), await dogs.run()
    payload = TrainingBatch(LossSpec(LossName.CROSS_ENTROPY), [])
    kind, body = OperationKind.FORWARD, stored(payload)
    for tenant, run, tokens in ((cats, light, 100), (cats, heavy, 40), (dogs, beside, 10)):
        await trainer(service, run)
        new = NewOperation(tenant.id, run, 1, kind, BASE, body, digest(payload), tokens, TRAINER)
        async with service.database.write() as transaction:
            await service.ledger.accept(transaction, new)

    async def before(client: AsyncWeft, run: str) -> int:
        ahead = (await client.runs.waiting(run)).ahead
        assert ahead is not None
        return ahead.own_tokens

    of_all = [(clients[0], light), (clients[0], heavy), (clients[1], beside)]
    assert [await before(*one) for one in of_all] == [100, 140, 10]
    assert (await clients[0].runs.weigh(heavy, 4.0)).weight == 4.0
    assert (await clients[0].runs.get(heavy)).weight == 4.0
    service.clock.move(seconds=2)
    for run in (light, heavy, beside):
        await trainer(service, run)
    weighed = [own_tokens_before(100, 1.0, [(4.0, 40)]), own_tokens_before(40, 4.0, [(1.0, 100)]), 10]
    assert [await before(*one) for one in of_all] == weighed
    assert weighed[1] < 40 + 10 + 100 + 26 < weighed[0]
    for weight in (0.0, 1000.0):
        with pytest.raises(BadRequest, match="weight must be"):
            await clients[0].runs.weigh(heavy, weight)
    with pytest.raises(NotThere, match="no model"):
        await clients[1].runs.weigh(heavy, 1.0)


async def test_limits_that_a_new_model_waits_for_are_told_apart(
    service: Service, cats: Tenant, dogs: Tenant, clients: tuple[AsyncWeft, AsyncWeft]
) -> None:
    await cats.run()
    for limit, reason in (("open_runs", "open_runs"), ("stored_bytes", "storage")):
        async with service.database.write() as transaction:
            await set_tenant(transaction, name="cats", limits={"open_runs": None, "stored_bytes": None})
            await set_tenant(transaction, name="cats", limits={limit: 1})
            await transaction.execute(update(Run).values(snapshot_dir="snapshots/x", snapshot_bytes=7))
        creation = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE}
        made = (await cats.http.post("/create_model", json=creation)).json()["request_id"]
        assert (await told(cats, made))[0] == "paused_capacity"
        assert (await clients[0].samples.waiting(made)).reason == reason
    creation["session_id"] = await dogs.session()
    theirs = (await dogs.http.post("/create_model", json=creation)).json()["request_id"]
    assert (await clients[1].samples.waiting(theirs)).reason == "no_trainer"


async def test_a_thousand_polls_that_end_together_share_their_statements(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    run, other = await cats.run(), await sampler(dogs)
    await trainer(service, run)
    training = [await cats.operation(run, seq_id) for seq_id in range(2, 12)]
    samples = [(await ask(dogs, other, seq_id)).json()["request_id"] for seq_id in range(10)]
    sent: list[str] = []
    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *call: sent.append(call[2]))
    waits = service.services.waits
    found = await asyncio.gather(*(waits.of((training + samples)[number % 20]) for number in range(POLLS)))
    assert all(wait is not None for wait in found)
    assert len(sent) <= 4 * (POLLS // 128 + 1)


@pytest.mark.parametrize("sdk", ["0.38.0", "0.18.2"])
async def test_the_sdk_logs_why_samples_and_training_wait(
    service: Service, cats: Tenant, dogs: Tenant, sdk: str
) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one", segment=Segment.SAMPLER_WEIGHTS)
    paused = await cats.http.post(f"/adapters/{run}/pause", json={"reason": "evaluation", "timeout_seconds": 0})
    assert paused.status_code == 200, paused.text
    path = [str(ROOT / ".venv/sdks" / f"tinker-{sdk}")] if sdk != "0.38.0" else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.api.sdk_reasons",
        service.url,
        cats.key,
        f"tinker://{run}/sampler_weights/one",
        BASE,
        sdk,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TINKER_TELEMETRY": "0", "PYTHONPATH": os.pathsep.join([*path, str(ROOT)])},
    )
    async with asyncio.timeout(120):
        output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()[-3000:]
    logged: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert f"sampling from model {run} is paused (keep) until" in logged["sample"]
    assert "evaluation" in logged["sample"]
    assert f"no trainer of {BASE} is there" in logged["training"]
    beside = (await ask(dogs, await sampler(dogs), 0)).json()["request_id"]
    assert "evaluation" not in (await told(dogs, beside))[1]
