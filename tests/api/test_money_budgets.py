"""A tenant, a key or a project whose money is spent is answered as one whose tokens are; its neighbours do not notice."""

from decimal import Decimal

import httpx
import pytest
from sqlalchemy import func, select

from contracts.vocabulary import BaseVocabulary
from contracts.waiting import WaitReason
from store.tables import Operation
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.price_additions import NewPrice, add_price
from tenants.prices import PricedQuantity
from tenants.projects import create_project
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_rates import OLD_SDK, ask, finish_samples, poll, sampler, standing, train
from tests.api.test_rates import settings as settings

PROJECT_HEADERS = {"X-Idempotency-Key": "one"}


async def price(service: Service, meter: PricedQuantity, amount: str, tenant: Tenant | None = None) -> None:
    async with service.database.write() as transaction:
        new = NewPrice(meter, amount, "USD", tenant=None if tenant is None else tenant.id)
        await add_price(transaction, new, service.clock)


async def budget(service: Service, tenant: Tenant, amount: str | None, name: BudgetName) -> None:
    async with service.database.write() as transaction:
        money = None if amount is None else Decimal(amount)
        await set_budget(transaction, tenant.id, name, money, service.clock())


@pytest.fixture
async def priced(service: Service) -> None:
    """A dollar a token of prompts, and one of drawn ones."""
    for meter in (PricedQuantity.PROMPT_TOKENS, PricedQuantity.SAMPLED_TOKENS):
        await price(service, meter, "1000000")


DOLLARS = BudgetName(Period.DAY, currency="USD")


async def session_in(tenant: Tenant, project: str) -> str:
    made = await tenant.http.post("/create_session", json={"project_id": project})
    found: str = made.raise_for_status().json()["session_id"]
    return found


async def sampler_in(tenant: Tenant, project: str) -> str:
    body = {"session_id": await session_in(tenant, project), "sampling_session_seq_id": 0, "base_model": BASE}
    made = await tenant.http.post("/create_sampling_session", json=body)
    found: str = made.raise_for_status().json()["sampling_session_id"]
    return found


def is_unpaid(answer: httpx.Response) -> bool:
    return (answer.status_code, answer.json().get("code")) == (402, "budget_spent")


async def test_work_of_spent_money_is_answered_402_and_goes_on_once_there_is_more(
    service: Service, cats: Tenant, dogs: Tenant, priced: None
) -> None:
    mine, theirs = await sampler(cats), await sampler(dogs)
    run = await cats.run()
    await budget(service, cats, "10.00", DOLLARS)
    await budget(service, dogs, "1000", DOLLARS)
    first = await ask(cats, mine, 0)
    assert await finish_samples(service) == 1
    (stands,) = (await standing(cats))["money_budgets"]
    assert (stands["amount"], stands["spent"], stands["currency"], stands["is_spent"]) == ("10", "10", "USD", True)
    assert [(one["percent"], one["amount"]) for one in (await standing(cats))["money_alerts"]] == [
        (100, "10"),
        (80, "10"),
    ]
    assert ((await standing(cats))["budgets"], (await standing(cats))["alerts"]) == ([], [])
    for refused in (await ask(cats, mine, 1), await train(cats, run, 1)):
        assert is_unpaid(refused)
        assert "this tenant's budget of the day in USD is spent" in refused.json()["detail"]
    async with service.database.read() as session:
        recorded = await session.scalar(select(func.count()).select_from(Operation).where(Operation.lane == run))
    assert recorded == 0
    # Results and repeats go on, and an SDK that takes 402 as final has its work held.
    assert (await poll(cats, first))["status"] == 200
    assert (await ask(cats, mine, 0)).json() == first.json()
    held = await poll(cats, await ask(cats, mine, 2, **OLD_SDK))
    assert (held["status"], held["queue_state"]) == (408, "paused_capacity")
    assert "until 2026-01-02 00:00 UTC" in held["queue_state_reason"]
    assert (await ask(dogs, theirs, 0)).status_code == 200
    # It holds the sample of cats, not that of dogs.
    assert await finish_samples(service) == 1
    service.clock.move(days=1)
    assert (await ask(cats, mine, 1)).status_code == 200
    assert await finish_samples(service) == 2
    assert (await standing(cats))["money_budgets"][0]["spent"] == "20"
    await budget(service, cats, "20.000001", DOLLARS)
    assert (await ask(cats, mine, 3)).status_code == 200


async def test_a_dearer_price_of_a_tenants_own_spends_its_money_sooner_and_nobody_elses(
    service: Service, cats: Tenant, dogs: Tenant, priced: None
) -> None:
    mine, theirs = await sampler(cats), await sampler(dogs)
    for tenant in (cats, dogs):
        await budget(service, tenant, "25", DOLLARS)
    for tenant, lane in ((cats, mine), (dogs, theirs)):
        await ask(tenant, lane, 0)
    assert await finish_samples(service) == 2
    assert not is_unpaid(await ask(cats, mine, 1))
    # Two tokens of its prompt and eight drawn ones, charged anew in the hour that runs.
    await price(service, PricedQuantity.SAMPLED_TOKENS, "3000000", cats)
    assert [(await standing(one))["money_budgets"][0]["spent"] for one in (cats, dogs)] == ["26", "10"]
    assert is_unpaid(await ask(cats, mine, 2))
    assert not is_unpaid(await ask(dogs, theirs, 1))


async def test_a_projects_budget_bounds_the_work_of_its_sessions_alone(
    service: Service, cats: Tenant, dogs: Tenant, priced: None
) -> None:
    async with service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "paper", service.clock)).id
    session = await session_in(cats, "paper")
    mine, other, theirs = await sampler_in(cats, "paper"), await sampler(cats), await sampler(dogs)
    run, elsewhere = await cats.run(session=session), await cats.run()
    await budget(service, cats, "10", BudgetName(Period.TOTAL, project=project))
    await budget(service, cats, "100", DOLLARS)
    await ask(cats, other, 0)
    await ask(cats, mine, 0)
    assert await finish_samples(service) == 2
    for refused in (await ask(cats, mine, 1), await train(cats, run, 1)):
        assert is_unpaid(refused)
        assert "this project's total budget in tokens is spent" in refused.json()["detail"]
    creation = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE}
    for taken in (
        await ask(cats, other, 1),
        await train(cats, elsewhere, 1),
        await cats.http.post("/create_model", json=creation),
        await ask(dogs, theirs, 0),
    ):
        assert taken.status_code == 200
    held = [await ask(cats, mine, 2, **OLD_SDK), await train(cats, run, 1, **OLD_SDK)]
    assert [(await poll(cats, one))["queue_state"] for one in held] == ["paused_capacity"] * 2
    assert "this project's total budget" in (await poll(cats, held[1]))["queue_state_reason"]
    weft = f"{service.url}/api/weft/v1/requests"
    waits = [await cats.http.get(f"{weft}/{one.json()['request_id']}/waiting") for one in held]
    assert [one.json().get("reason", one.text) for one in waits] == [WaitReason.BUDGET] * 2
    stands = (await standing(cats))["budgets"]
    assert [(one["project"], one["project_name"], one["spent"]) for one in stands] == [(project, "paper", 10)]
    # Work follows its session: in the default project nothing holds it.
    moved = await cats.http.put(f"/sessions/{mine.partition(':')[0]}/project", json={"project_id": "default"})
    assert moved.status_code == 204, moved.text
    assert not is_unpaid(await ask(cats, mine, 1))
    assert "budget" not in (await poll(cats, held[0])).get("queue_state_reason", "")
    assert "budget" in (await poll(cats, held[1]))["queue_state_reason"]


async def test_openai_clients_are_told_that_their_quota_is_spent(
    service: Service, cats: Tenant, dogs: Tenant, priced: None
) -> None:
    mine = await sampler(cats)
    await budget(service, cats, "10", DOLLARS)
    await ask(cats, mine, 0)
    await finish_samples(service)
    service.services.vocabularies[BASE] = BaseVocabulary(frozenset(), str)
    body = {"model": BASE, "prompt": [1, 2], "max_tokens": 1}
    refused = await cats.http.post(f"{service.url}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "in USD is spent" in refused.json()["error"]["message"]
