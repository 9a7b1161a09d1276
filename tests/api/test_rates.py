"""A tenant over its rate or budget has its work accepted and held, or is told to come again; its neighbour does not notice."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import func, select

from contracts.ledger_records import Completion
from contracts.operations import SampledSequence, SampleOutput
from store.settings import Settings
from store.tables import Operation, Run
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.keys import find_key, rotate_key
from tenants.limits import set_tenant
from tests.api.conftest import BASE, Service, Tenant
from tests.ledger_heads import pending_samples

OLD_SDK = {"x-stainless-package-version": "0.18.2"}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Polls without a result are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


async def limit(service: Service, **limits: int | None) -> None:
    """Set the limits of ``cats``, as ``weft tenant set`` does."""
    async with service.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits=limits, clock=service.clock)


async def budget(service: Service, cats: Tenant, amount: int | None, *, key: int | None = None) -> None:
    """Give ``cats`` a budget for the day, as ``weft tenant budget`` does."""
    async with service.database.write() as transaction:
        now = service.clock()
        await set_budget(transaction, cats.id, BudgetName(Period.DAY, key), amount, now)


async def train(tenant: Tenant, run: str, seq_id: int, **headers: str) -> httpx.Response:
    """A pass of four tokens."""
    inputs = {name: {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [4]} for name in ("target_tokens",)}
    inputs["weights"] = {"data": [1.0] * 4, "dtype": "float32", "shape": [4]}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]}, "loss_fn_inputs": inputs}
    body = {
        "model_id": run,
        "seq_id": seq_id,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }
    return await tenant.http.post("/forward_backward", json=body, headers=headers)


async def sampler(tenant: Tenant) -> str:
    """Return a sampler of the bare base."""
    body = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    found: str = (await tenant.http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
    return found


async def ask(tenant: Tenant, sampler: str, seq_id: int, **headers: str) -> httpx.Response:
    """A sample that may take ten tokens."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 8},
    }
    return await tenant.http.post("/asample", json=body, headers=headers)


async def poll(tenant: Tenant, answer: httpx.Response) -> dict[str, Any]:
    """The state of an accepted request."""
    found = await tenant.http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
    return {"status": found.status_code, **found.json()}


async def finish_samples(service: Service, *, drawn: int = 8) -> int:
    """Do what a sampler does with every sample that waits."""
    tokens = SampledSequence("stop", np.zeros(drawn, np.int32), np.zeros(drawn, np.float32))
    async with service.database.read() as session:
        ready = await pending_samples(service.ledger, session, BASE, service.clock())
    async with service.database.write() as transaction:
        await service.ledger.complete(transaction, [Completion(one, SampleOutput([tokens])) for one in ready])
    return len(ready)


async def standing(tenant: Tenant) -> dict[str, Any]:
    """Standing of the tenant, as its route tells it."""
    found: dict[str, Any] = (await tenant.http.get(f"{tenant.service.url}/api/weft/v1/usage/standing")).json()
    return found


async def test_training_over_the_rate_is_accepted_and_a_poll_tells_for_how_long_it_waits(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await limit(service, train_tokens_per_minute=60, train_tokens_burst=4)
    mine, theirs = await cats.run(), await dogs.run()
    sent = [await train(cats, mine, seq_id) for seq_id in (1, 2, 3)]
    assert [answer.status_code for answer in sent] == [200] * 3
    assert [answer.headers["ratelimit"] for answer in sent] == [f'"train-tokens";r=0;t={4 * (n + 1)}' for n in range(3)]
    assert (await train(cats, mine, 3)).json() == sent[2].json()
    told = [await poll(cats, answer) for answer in sent]
    assert [one["status"] for one in told] == [408] * 3
    # No trainer is there.
    assert told[0]["queue_state"] == "paused_capacity"
    assert [one["queue_state"] for one in told[1:]] == ["paused_rate_limit"] * 2
    assert "60 tokens of training a minute is used up; this request runs in about 4 s" in told[1]["queue_state_reason"]
    assert "runs in about 8 s" in told[2]["queue_state_reason"]
    # A step takes no tokens: it waits for the pass before it.
    step = await cats.http.post("/optim_step", json={"model_id": mine, "seq_id": 4})
    assert "ratelimit" not in step.headers
    assert (await poll(cats, step))["queue_state"] != "paused_rate_limit"
    others = await train(dogs, theirs, 1)
    assert "ratelimit" not in others.headers
    assert (await poll(dogs, others))["queue_state"] != "paused_rate_limit"
    service.clock.move(seconds=4)
    assert (await poll(cats, sent[1]))["queue_state"] != "paused_rate_limit"
    assert "runs in about 4 s" in (await poll(cats, sent[2]))["queue_state_reason"]
    (rate,) = (await standing(cats))["rates"]
    assert (rate["meter"], rate["per_minute"], rate["burst"], rate["waiting"], rate["remaining"]) == (
        "train",
        60,
        4,
        8,
        0,
    )
    assert (await standing(dogs))["rates"] == []


async def test_samples_over_the_rate_wait_and_their_answers_tell_the_rate(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await limit(service, sample_tokens_per_minute=60, sample_tokens_burst=20)
    mine, theirs = await sampler(cats), await sampler(dogs)
    answers = [await ask(cats, mine, seq_id) for seq_id in range(3)]
    assert [answer.headers["ratelimit-policy"] for answer in answers] == ['"sample-tokens";q=20;w=20'] * 3
    assert [answer.headers["ratelimit"] for answer in answers] == [
        '"sample-tokens";r=10;t=10',
        '"sample-tokens";r=0;t=20',
        '"sample-tokens";r=0;t=30',
    ]
    assert (await poll(cats, answers[1]))["queue_state_reason"] != (await poll(cats, answers[2]))["queue_state_reason"]
    assert (await poll(cats, answers[2]))["queue_state"] == "paused_rate_limit"
    assert "runs in about 10 s" in (await poll(cats, answers[2]))["queue_state_reason"]
    theirs_first = await ask(dogs, theirs, 0)
    assert "ratelimit" not in theirs_first.headers
    # What they did not take comes back.
    async with service.database.read() as session:
        waiting = {one.id: one for one in await pending_samples(service.ledger, session, BASE)}
    short = SampleOutput([SampledSequence("stop", np.zeros(1, np.int32), np.zeros(1, np.float32))])
    async with service.database.write() as transaction:
        first = waiting[answers[0].json()["request_id"]]
        await service.ledger.complete(transaction, [Completion(first, short)])
    assert "runs in about 3 s" in (await poll(cats, answers[2]))["queue_state_reason"]
    await limit(service, sample_tokens_per_minute=None)
    assert (await poll(cats, answers[2]))["queue_state"] != "paused_rate_limit"


async def test_work_of_a_spent_budget_is_answered_402_and_goes_on_once_it_is_raised(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine, theirs = await sampler(cats), await sampler(dogs)
    run, other = await cats.run(), await dogs.run()
    await budget(service, cats, 10)
    first = await ask(cats, mine, 0)
    assert await finish_samples(service) == 1
    spent = (await standing(cats))["budgets"]
    assert [(one["period"], one["amount"], one["spent"], one["is_spent"]) for one in spent] == [("day", 10, 10, True)]
    assert [one["percent"] for one in (await standing(cats))["alerts"]] == [100, 80]
    for refused in (await ask(cats, mine, 1), await train(cats, run, 1)):
        assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (402, "budget_spent", True)
        assert "budget of the day in tokens is spent" in refused.json()["detail"]
    # Results, repeats of accepted work, and work without tokens go on.
    kept = await cats.run(model_seq_id=9)
    for seq_id, step in enumerate(("optim_step", "save_weights"), 1):
        body = {"model_id": kept, "seq_id": seq_id, "path": "kept"}
        assert (await cats.http.post(f"/{step}", json=body)).status_code == 200, step
    assert (await poll(cats, first))["status"] == 200
    assert (await ask(cats, mine, 0)).json() == first.json()
    assert (await ask(dogs, theirs, 0)).status_code == 200
    assert (await train(dogs, other, 1)).status_code == 200
    async with service.database.read() as session:
        recorded = await session.scalar(select(func.count()).select_from(Operation).where(Operation.lane == run))
    assert recorded == 0
    await budget(service, cats, 1000)
    assert (await ask(cats, mine, 1)).status_code == 200
    assert (await train(cats, run, 1)).status_code == 200


async def test_a_number_that_accepted_work_waits_for_is_taken_though_the_budget_is_spent(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    """SDKs send the first chunk of a pass last. A 402 for it would leave a hole that is closed by a failure."""
    mine, run, other = await sampler(cats), await cats.run(), await cats.run()
    async with service.database.read() as session:
        first = await session.scalar(select(Run.next_seq_id).where(Run.id == run)) or 0
    assert (await train(cats, run, first + 1)).status_code == 200
    await budget(service, cats, 10)
    await ask(cats, mine, 0)
    assert await finish_samples(service) == 1
    assert (await train(cats, other, first)).status_code == 402
    assert (await train(cats, run, first)).status_code == 200
    assert (await train(cats, run, first + 2)).status_code == 402
    assert (await train(dogs, await dogs.run(), first)).status_code == 200


async def test_an_sdk_that_knows_no_402_has_its_work_accepted_and_held(service: Service, cats: Tenant) -> None:
    mine, run = await sampler(cats), await cats.run()
    await budget(service, cats, 10)
    await ask(cats, mine, 0)
    await finish_samples(service)
    held = [await ask(cats, mine, 1, **OLD_SDK), await train(cats, run, 1, **OLD_SDK)]
    creation = {"session_id": await cats.session(), "model_seq_id": 3, "base_model": BASE, "lora_config": {"rank": 4}}
    held.append(await cats.http.post("/create_model", json=creation, headers=OLD_SDK))
    assert [answer.status_code for answer in held] == [200] * 3
    for answer in held:
        told = await poll(cats, answer)
        assert (told["status"], told["queue_state"]) == (408, "paused_capacity")
        assert "until 2026-01-02 00:00 UTC" in told["queue_state_reason"]
    assert await finish_samples(service) == 0
    # The day is over.
    service.clock.move(days=1)
    assert "budget" not in (await poll(cats, held[1])).get("queue_state_reason", "")
    assert await finish_samples(service) == 1
    assert (await standing(cats))["budgets"][0]["spent"] == 10


async def test_a_keys_budget_bounds_that_key_alone(service: Service, cats: Tenant, dogs: Tenant) -> None:
    mine = await sampler(cats)
    async with service.database.read() as session:
        await ask(cats, mine, 0)
        key = await session.scalar(select(Operation.key_id).where(Operation.tenant_id == cats.id))
    await budget(service, cats, 1000)
    await budget(service, cats, 10, key=key)
    await finish_samples(service)
    assert (await ask(cats, mine, 1)).json()["detail"].startswith("this API key's budget of the day")
    found = {one["key"]: one["spent"] for one in (await standing(cats))["budgets"]}
    assert found == {None: 10, key: 10}
    other = await sampler(dogs)
    assert (await ask(dogs, other, 0)).status_code == 200


async def test_a_key_that_takes_anothers_place_spends_of_the_same_budget(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine = await sampler(cats)
    await ask(cats, mine, 0)
    async with service.database.write() as transaction:
        old = await transaction.scalar(select(Operation.key_id).where(Operation.tenant_id == cats.id))
        key = await find_key(transaction, cats.id, old or 0)
        new = await rotate_key(transaction, key, grace=timedelta(hours=1), clock=service.clock)
    await budget(service, cats, 15, key=new.id)
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": new.secret}) as http:
        later = replace(cats, http=http)
        assert (await ask(later, mine, 1)).status_code == 200
        # Half of it by each key: neither alone is over the budget.
        assert await finish_samples(service) == 2
        assert [(await ask(one, mine, 2)).status_code for one in (cats, later)] == [402, 402]
        held = await ask(later, mine, 3, **OLD_SDK)
        assert (await poll(later, held))["queue_state_reason"].startswith("this API key's budget of the day")
        assert await finish_samples(service) == 0
    assert [(one["key"], one["spent"]) for one in (await standing(cats))["budgets"]] == [(old, 20)]
    assert (await ask(dogs, await sampler(dogs), 0)).status_code == 200
