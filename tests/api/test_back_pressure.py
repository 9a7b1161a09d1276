"""A tenant with too many samples pending is asked to hold back, no sample is dropped, and its neighbour does not notice."""

import httpx
import numpy as np
import pytest
from sqlalchemy import text

from contracts.ledger_records import Completion
from contracts.operations import OperationKind, SampledSequence, SampleOutput
from store.settings import Settings
from tenants.limits import set_tenant
from tests.api.conftest import BASE, Service, Tenant
from tests.ledger_heads import pending_samples

MOST = 3
OUTPUT = SampleOutput([SampledSequence("length", np.zeros(1, np.int32), np.zeros(1, np.float32))])


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Few pending samples are too many."""
    return settings.model_copy(update={"limit_pending_samples": MOST})


async def sampler(tenant: Tenant) -> str:
    """Return a sampler of the bare base."""
    answer = await tenant.http.post(
        "/create_sampling_session",
        json={"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE},
    )
    found: str = answer.json()["sampling_session_id"]
    return found


async def ask(tenant: Tenant, sampler: str, seq_id: int, *, max_tokens: int = 1, **wanted: int) -> httpx.Response:
    """One more sample."""
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": max_tokens},
        **wanted,
    }
    return await tenant.http.post("/asample", json=body)


async def test_too_many_pending_samples_are_answered_429_and_accepted_later(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    mine, theirs = await sampler(cats), await sampler(dogs)
    accepted = [await ask(cats, mine, seq_id) for seq_id in range(MOST)]
    assert [answer.status_code for answer in accepted] == [200] * MOST
    refused = await ask(cats, mine, MOST)
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (429, "too_many_samples", True)
    assert refused.headers["retry-after"] == "1"
    assert (await ask(cats, mine, 0)).json() == accepted[0].json()
    assert (await ask(dogs, theirs, 0)).status_code == 200
    async with service.database.read() as session:
        pending = await pending_samples(service.ledger, session, BASE)
    first = next(one for one in pending if one.lane == mine)
    async with service.database.write() as transaction:
        await service.ledger.complete(transaction, [Completion(first, OUTPUT)])
    again = await ask(cats, mine, MOST)
    assert again.status_code == 200
    assert again.json()["request_id"] not in [answer.json()["request_id"] for answer in accepted]


async def test_training_is_not_held_back_by_pending_samples(cats: Tenant) -> None:
    mine = await sampler(cats)
    for seq_id in range(MOST):
        await ask(cats, mine, seq_id)
    run = await cats.run()
    assert await cats.operation(run, kind=OperationKind.OPTIM_STEP)


async def test_pending_samples_are_counted_on_their_own_index(service: Service) -> None:
    query = (
        "EXPLAIN QUERY PLAN SELECT count(*) FROM (SELECT tenant_id FROM operations "
        "WHERE state = 'pending' AND kind = 'sample' AND tenant_id = 'x' LIMIT 5)"
    )
    async with service.database.read() as session:
        plan = " ".join(str(row) for row in (await session.execute(text(query))).all())
    assert "ix_operations_pending_samples" in plan


async def test_a_sample_that_wants_too_much_at_once_is_refused_with_the_number(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    async with service.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"sample_work": 4 * 8 * 5 - 1, "sample_tokens": 40})
    mine, theirs = await sampler(cats), await sampler(dogs)
    wanted = {"num_samples": 4, "topk_sample_logprobs": 5, "max_tokens": 8}
    refused = await ask(cats, mine, 0, **wanted)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert "num_samples x max_tokens x topk is 160" in refused.json()["detail"]
    assert (await ask(dogs, theirs, 0, **wanted)).status_code == 200
    assert (await ask(cats, mine, 1, num_samples=4, max_tokens=8)).status_code == 200
    held = await ask(cats, mine, 2, num_samples=1, max_tokens=8)
    assert (held.status_code, "34 of 40 tokens" in held.json()["detail"]) == (429, True)
    never = await ask(cats, mine, 3, num_samples=5, max_tokens=8)
    assert (never.status_code, "this sample may take 42 tokens" in never.json()["detail"]) == (400, True)
