"""A key or a project over its rate has its work accepted and held, and is told which; its tenant's others do not notice."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from contracts.vocabulary import BaseVocabulary
from store.repeat import wait_for
from store.settings import Settings
from store.tables import Operation
from tenants.keys import create_key
from tenants.projects import create_project
from tenants.rights import KeyRights, Role, Scope
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_rates import ask, finish_samples, limit, poll, sampler, standing, train

TRAIN = {"train_tokens_per_minute": 60, "train_tokens_burst": 4}
SAMPLE = {"sample_tokens_per_minute": 600, "sample_tokens_burst": 10}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Polls without a result are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


class Keys:
    """Tenants by keys of their own."""

    def __init__(self, clients: AsyncExitStack) -> None:
        self._clients = clients

    async def by(self, tenant: Tenant, secret: str) -> Tenant:
        """The same tenant, by another key."""
        http = httpx.AsyncClient(base_url=tenant.http.base_url, headers={"X-API-Key": secret}, timeout=30)
        return replace(tenant, key=secret, http=await self._clients.enter_async_context(http))

    async def administrator(self, tenant: Tenant, **limits: int) -> Tenant:
        """The tenant by an administrator's key with these rates."""
        async with tenant.service.database.write() as transaction:
            rights = KeyRights(role=Role.ADMIN, limits=limits or None)
            made = await create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=rights)
        return await self.by(tenant, made.secret)

    async def made(self, admin: Tenant, **asked: object) -> tuple[Tenant, int]:
        """The tenant by a key that its administrator makes, and the key's number."""
        answer = await admin.http.post(f"{admin.service.url}/api/weft/v1/keys", json=asked)
        body = answer.raise_for_status().json()
        return await self.by(admin, body["secret"]), body["key_id"]


@pytest_asyncio.fixture
async def keys() -> AsyncIterator[Keys]:
    """Clients of further keys, which are closed at the end."""
    async with AsyncExitStack() as clients:
        yield Keys(clients)


async def bound(admin: Tenant, what: str, limits: Mapping[str, int | None]) -> httpx.Response:
    """Set the rates of ``keys/N`` or ``projects/NAME``."""
    return await admin.http.put(f"{admin.service.url}/api/weft/v1/{what}/limits", json={"limits": dict(limits)})


async def why(tenant: Tenant, answer: httpx.Response) -> dict[str, Any]:
    """Reason for which an accepted request waits."""
    path = f"/api/weft/v1/requests/{answer.json()['request_id']}/waiting"
    found: dict[str, Any] = (await tenant.http.get(tenant.service.url + path)).raise_for_status().json()
    return found


async def session_in(tenant: Tenant, project: str | None) -> str:
    answer = await tenant.http.post("/create_session", json={"project_id": project})
    found: str = answer.raise_for_status().json()["session_id"]
    return found


async def test_training_over_a_keys_rate_waits_and_is_told_which_while_another_key_of_the_tenant_goes_on(
    service: Service, cats: Tenant, dogs: Tenant, keys: Keys
) -> None:
    admin = await keys.administrator(cats)
    bounded, number = await keys.made(admin, limits=TRAIN)
    mine, other, theirs = await cats.run(), await cats.run(), await dogs.run()
    sent = [await train(bounded, mine, seq_id) for seq_id in (1, 2, 3)]
    assert [answer.status_code for answer in sent] == [200] * 3
    assert [answer.headers["ratelimit"] for answer in sent] == [f'"train-tokens";r=0;t={4 * (n + 1)}' for n in range(3)]
    free = [await train(cats, other, seq_id) for seq_id in (1, 2, 3)]
    free += [await train(dogs, theirs, 1)]
    assert [(answer.status_code, "ratelimit" in answer.headers) for answer in free] == [(200, False)] * 4
    # A repeat tells the rate, and moves nothing.
    again = await train(bounded, mine, 3)
    assert (again.json(), again.headers["ratelimit"]) == (sent[2].json(), sent[2].headers["ratelimit"])
    told = [await poll(bounded, answer) for answer in sent]
    assert [one["queue_state"] for one in told] == ["paused_capacity", "paused_rate_limit", "paused_rate_limit"]
    assert "the rate of this API key of 60 tokens of training a minute is used up" in told[2]["queue_state_reason"]
    assert "in about 8 s" in told[2]["queue_state_reason"]
    waiting = [(await why(cats, answer)) for answer in (sent[2], free[2])]
    assert waiting[0]["reason"] == "rate_limit"
    assert "the rate of this API key" in waiting[0]["text"]
    assert "rate" not in waiting[1]["text"]
    (rate,) = (await standing(admin))["rates"]
    assert {name: rate[name] for name in ("meter", "per_minute", "burst", "waiting", "key", "project")} == {
        "meter": "train",
        "per_minute": 60,
        "burst": 4,
        "waiting": 12,
        "key": number,
        "project": None,
    }
    service.clock.move(seconds=9)
    assert [(await poll(bounded, answer))["queue_state"] for answer in sent] == ["paused_capacity"] * 3
    assert (await standing(dogs))["rates"] == []


async def test_the_tightest_of_its_rates_is_told_and_holds(service: Service, cats: Tenant, keys: Keys) -> None:
    await limit(service, sample_tokens_per_minute=6000, sample_tokens_burst=1000)
    admin = await keys.administrator(cats)
    await admin.http.post(f"{service.url}/api/weft/v1/projects", json={"name": "paper"})
    assert (
        await bound(admin, "projects/paper", {"sample_tokens_per_minute": 60, "sample_tokens_burst": 10})
    ).status_code == 200
    bounded, _ = await keys.made(admin, limits=SAMPLE)
    session = await session_in(bounded, "paper")
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    inside = (await bounded.http.post("/create_sampling_session", json=body)).json()["sampling_session_id"]
    outside = await sampler(cats)
    sent = [await ask(bounded, inside, number) for number in range(3)]
    # 60 a minute after a burst of 10, where the key has 600 and the tenant 6000.
    assert [one.headers["ratelimit"] for one in sent] == [f'"sample-tokens";r=0;t={10 * (n + 1)}' for n in range(3)]
    assert sent[0].headers["ratelimit-policy"] == '"sample-tokens";q=10;w=10'
    assert "the rate of this project of 60 tokens" in (await poll(bounded, sent[2]))["queue_state_reason"]
    beside = await ask(cats, outside, 0)
    assert beside.headers["ratelimit-policy"] == '"sample-tokens";q=1000;w=10'
    # The first of the project's, and the one that is not in it.
    assert await finish_samples(service) == 2
    service.clock.move(seconds=21)
    assert await finish_samples(service) == 2
    rates = (await standing(admin))["rates"]
    assert [(one["key"] is not None, one["project"] is not None) for one in rates] == [
        (False, False),
        (True, False),
        (False, True),
    ]


async def test_openais_clients_are_told_to_come_again_by_their_keys_rate_and_other_keys_are_not(
    service: Service, cats: Tenant, dogs: Tenant, keys: Keys
) -> None:
    service.services.vocabularies[BASE] = BaseVocabulary(frozenset(), str)
    bounded, _ = await keys.made(
        await keys.administrator(cats), limits={"sample_tokens_per_minute": 60, "sample_tokens_burst": 10}
    )

    async def complete(tenant: Tenant, **headers: str) -> httpx.Response:
        body: dict[str, Any] = {"model": BASE, "prompt": [1, 2], "max_tokens": 20}
        keys = {"Authorization": f"Bearer {tenant.key}", **headers}
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as http:
            return await http.post("/v1/completions", json=body, headers=keys)

    await ask(bounded, await sampler(bounded), 0)
    refused = await complete(bounded)
    assert refused.status_code == 429
    assert "the rate of this key of 60 tokens a minute lets it run in 10 s" in refused.json()["error"]["message"]
    assert (refused.headers["retry-after"], refused.headers["ratelimit"]) == ("10", '"sample-tokens";r=0;t=10')
    told = {name: refused.headers[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining", "reset")}
    assert told == {"limit": "10", "remaining": "0", "reset": "10s"}
    # A key of the tenant without a rate, and another tenant: nothing draws, so theirs wait to be followed.
    for free in (cats, dogs):
        assert (await ask(free, await sampler(free), 0)).status_code == 200


async def test_prompts_of_one_request_are_taken_together_or_not_at_all(
    service: Service, cats: Tenant, dogs: Tenant, keys: Keys
) -> None:
    """A refusal leaves nothing under the ``Idempotency-Key``, and the repeat after the told time is answered."""
    letters = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    service.services.vocabularies[BASE] = letters
    bounded, _ = await keys.made(
        await keys.administrator(cats), limits={"sample_tokens_per_minute": 60, "sample_tokens_burst": 30}
    )

    async def complete(**more: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": [[1, 2], [3, 4]], "max_tokens": 10, **more}
        headers = {"Authorization": f"Bearer {bounded.key}", "Idempotency-Key": "both"}
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
            return await http.post("/v1/completions", json=body, headers=headers)

    async def accepted() -> int:
        async with service.database.read() as session:
            return await session.scalar(select(func.count()).select_from(Operation)) or 0

    for tenant in (bounded, dogs):
        assert (await ask(tenant, await sampler(tenant), 0)).status_code == 200
    refused = await complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "4")
    assert "these 2 samples may take 24 tokens" in refused.json()["error"]["message"]
    assert await accepted() == 2
    service.clock.move(seconds=4)
    asking = asyncio.create_task(complete())
    async with asyncio.timeout(60):
        while await accepted() < 4 and not asking.done():
            await wait_for(asyncio.Event(), 0.02)
    assert await finish_samples(service) == 4
    answer = await asking
    assert (answer.status_code, len(answer.json()["choices"])) == (200, 2)
    assert (await complete()).json()["choices"] == answer.json()["choices"]
    # Another request under the key is refused whole, also the prompt that is new in it.
    other = await complete(prompt=[[1, 2], [3, 4], [5, 6]])
    assert (other.status_code, await accepted()) == (400, 4)


async def test_nobody_gives_a_key_more_than_his_own_rate_nor_himself(cats: Tenant, dogs: Tenant, keys: Keys) -> None:
    admin = await keys.administrator(cats)
    slow = await keys.administrator(cats, **TRAIN)
    _, number = await keys.made(slow)
    listed = (await admin.http.get(f"{cats.service.url}/api/weft/v1/keys")).json()["keys"]
    # A key that is made has its maker's rates.
    assert next(one["limits"] for one in listed if one["key_id"] == number) == TRAIN
    own = next(one["key_id"] for one in listed if slow.key.startswith(one["prefix"]))
    faster = {"train_tokens_per_minute": 61}
    for answer in (
        await slow.http.post(f"{cats.service.url}/api/weft/v1/keys", json={"limits": faster}),
        await bound(slow, f"keys/{number}", {"train_tokens_burst": 5}),
        await bound(slow, f"keys/{own}", dict.fromkeys(TRAIN)),
    ):
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert "train_tokens" in answer.json()["detail"]
    assert (await bound(slow, f"keys/{number}", {"train_tokens_per_minute": 30})).json()["limits"] == {
        **TRAIN,
        "train_tokens_per_minute": 30,
    }
    assert (await bound(await keys.administrator(dogs), f"keys/{number}", faster)).status_code == 404
    assert (await bound(admin, f"keys/{number}", {"open_runs": 1})).status_code == 400
    assert (await bound(admin, f"keys/{number}", {"train_tokens_per_minute": 0})).status_code == 400
    viewer, _ = await keys.made(admin, role="viewer")
    assert (await bound(viewer, f"keys/{number}", {})).status_code == 403


async def test_a_rotated_keys_work_waits_in_the_line_of_the_one_whose_place_it_takes(
    service: Service, cats: Tenant, keys: Keys
) -> None:
    admin = await keys.administrator(cats)
    bounded, number = await keys.made(admin, limits=TRAIN)
    run = await cats.run()
    await train(bounded, run, 1)
    answer = await bounded.http.post(f"{service.url}/api/weft/v1/keys/{number}/rotate", json={})
    rotated = await keys.by(cats, answer.raise_for_status().json()["secret"])
    second = await train(rotated, run, 2)
    assert second.headers["ratelimit"] == '"train-tokens";r=0;t=8'
    # What is set of either holds for both.
    assert (await bound(admin, f"keys/{number}", {"train_tokens_per_minute": 240})).status_code == 200
    assert (await train(rotated, run, 3)).headers["ratelimit"] == '"train-tokens";r=0;t=3'
    assert (await train(bounded, run, 4)).headers["ratelimit"] == '"train-tokens";r=0;t=4'


async def test_keys_that_a_bounded_key_makes_stand_in_its_line(service: Service, cats: Tenant, keys: Keys) -> None:
    """Else a key would let through as many times its rate as it makes keys. The tenant's other keys stand in no line."""
    slow = await keys.administrator(cats, **TRAIN)
    made, _ = await keys.made(slow)
    run = await cats.run()
    await train(slow, run, 1)
    assert (await train(made, run, 2)).headers["ratelimit"] == '"train-tokens";r=0;t=8'
    own = await slow.http.post(f"{service.url}/api/weft/v1/keys", json={"limits": {**TRAIN, "train_tokens_burst": 1}})
    assert (own.status_code, "limits" in own.json()["detail"]) == (403, True)
    assert "ratelimit" not in (await train(cats, run, 3)).headers


async def test_a_key_of_some_projects_reads_the_rates_of_these_alone(
    service: Service, cats: Tenant, keys: Keys
) -> None:
    admin = await keys.administrator(cats)
    names = []
    for name in ("one", "two"):
        async with service.database.write() as transaction:
            names.append((await create_project(transaction, cats.id, name, service.clock)).id)
        assert (await bound(admin, f"projects/{name}", dict(TRAIN))).status_code == 200
    reader, _ = await keys.made(admin, role="billing", scopes=[Scope.USAGE], projects=["two"])
    assert [one["project"] for one in (await standing(reader))["rates"]] == names[1:]
    assert [one["project"] for one in (await standing(admin))["rates"]] == sorted(names)
