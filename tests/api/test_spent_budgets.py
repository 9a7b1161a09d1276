"""Under a spent budget a model's creation waits, and a run whose client is refused tells why; neighbours notice nothing."""

from datetime import timedelta

import pytest
from sqlalchemy import select, update
from weft_client.asynchronous import AsyncWeft

from contracts.operations import ForwardBackwardOutput
from contracts.waiting import WaitReason
from store.settings import Settings
from store.tables import ApiKey, Run, RunState
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.projects import create_project
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_money_budgets import session_in
from tests.api.test_rates import ask, budget, finish_samples, poll, sampler, train


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Polls without a result are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


async def reason(tenant: Tenant, run: str) -> tuple[str | None, str]:
    """Reason and text of the run's wait."""
    async with AsyncWeft(tenant.service.url, tenant.key) as weft:
        found = await weft.runs.waiting(run)
    return found.reason, found.text or ""


async def test_a_creation_under_a_spent_budget_is_accepted_and_waits_until_it_is_raised(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine = await sampler(cats)
    await budget(service, cats, 10)
    await spend_all(service, cats, mine)
    told, made = [], []
    for tenant in (cats, dogs):
        creation = {"session_id": await tenant.session(), "model_seq_id": 3, "base_model": BASE}
        answer = await tenant.http.post("/create_model", json=creation)
        assert answer.status_code == 200, answer.text
        made.append(answer.json()["model_id"])
        told.append(((await poll(tenant, answer)).get("queue_state_reason", ""), *await reason(tenant, made[-1])))
    (polled, why, text), (beside, other, _) = told
    assert (why, polled) == (WaitReason.BUDGET, text)
    assert "budget of the day in tokens is spent" in text
    assert other != WaitReason.BUDGET
    assert "budget" not in beside
    await budget(service, cats, 1000)
    assert (await reason(cats, made[0]))[0] not in (None, WaitReason.BUDGET)


async def spend_all(service: Service, cats: Tenant, sampler: str) -> None:
    """Use the ten tokens of a budget."""
    await ask(cats, sampler, 0)
    assert await finish_samples(service) == 1


@pytest.mark.parametrize("scope", ["tenant", "key", "project"])
async def test_a_run_whose_passes_a_spent_budget_refuses_tells_it_though_nothing_is_pending(
    service: Service, cats: Tenant, dogs: Tenant, scope: str
) -> None:
    async with service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "paper", service.clock)).id
        key = await transaction.scalar(select(ApiKey.id).where(ApiKey.tenant_id == cats.id))
        names = {
            "tenant": BudgetName(Period.DAY),
            "key": BudgetName(Period.DAY, key),
            "project": BudgetName(Period.DAY, project=project),
        }
        await set_budget(transaction, cats.id, names[scope], 10, service.clock())
    session = await session_in(cats, "paper")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    lane = (await cats.http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
    run, elsewhere, theirs = await cats.run(session=session), await cats.run(), await dogs.run()
    ended = await cats.run(session=session, model_seq_id=1)
    # The run's last request came with the key, and is done.
    assert (await train(cats, run, 1)).status_code == 200
    await service.run_next(ForwardBackwardOutput([], {}))
    assert (await reason(cats, run))[0] is None
    await spend_all(service, cats, lane)
    assert (await train(cats, run, 2)).status_code == 402
    why, text = await reason(cats, run)
    assert why == WaitReason.BUDGET
    assert "is spent; work goes on once it is raised or until 2026-01-02 00:00 UTC" in text
    assert ((await reason(cats, elsewhere))[0] is None) == (scope != "tenant")
    assert (await reason(dogs, theirs))[0] is None
    async with service.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == ended).values(state=RunState.UNLOADED))
    assert (await reason(cats, ended))[0] is None
    service.clock.move(days=1)
    assert (await reason(cats, run))[0] is None
