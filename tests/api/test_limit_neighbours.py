"""Every limit of a tenant, while it holds: the same request of another tenant goes through at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from contracts.errors import StorageFull
from contracts.ids import CheckpointId, RequestId, SamplerId
from contracts.paths import Segment
from contracts.waiting import WaitReason
from store.settings import Settings
from store.tables import SampleRecord
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id
from tenants.keys import create_key
from tenants.limits import LIMIT_NAMES, Counted, Limits, hold_count, set_tenant
from tenants.rights import KeyRights, Role
from tenants.sample_records import LEAST_BYTES, NewRecord, record_samples
from tenants.storage import store_checkpoint
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_rates import ask, sampler, train

Attempt = Callable[[Tenant], Awaitable[str]]
"""Attempt of a tenant. Its end is told in a word or two."""
WEFT = "/api/weft/v1"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Requests without room are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


@pytest_asyncio.fixture
async def pair(service: Service, cats: Tenant, dogs: Tenant) -> AsyncIterator[tuple[Tenant, Tenant]]:
    """Two tenants, with clients of administrators' keys."""
    async with service.database.write() as transaction:
        rights = KeyRights(role=Role.ADMIN)
        secrets = [
            (await create_key(transaction, tenant=one.id, note="", clock=service.clock, rights=rights)).secret
            for one in (cats, dogs)
        ]
    clients = [
        httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers={"X-API-Key": key}, timeout=40) for key in secrets
    ]
    yield (
        Tenant(service, cats.id, secrets[0], clients[0]),
        Tenant(service, dogs.id, secrets[1], clients[1]),
    )
    for one in clients:
        await one.aclose()


def told(answer: httpx.Response) -> str:
    """Return the status and the code of an answer that is none of success."""
    return "accepted" if answer.is_success else f"{answer.status_code} {answer.json().get('code')}"


async def fate(tenant: Tenant, answer: httpx.Response) -> str:
    """Return the reason for which an accepted request waits, or how it has failed."""
    assert answer.status_code == 200, answer.text
    request = answer.json()["request_id"]
    polled = await tenant.http.post("/retrieve_future", json={"request_id": request})
    if polled.status_code == 200:
        return f"failed {polled.json()['category']}"
    assert polled.status_code == 408, polled.text
    waits = await tenant.http.get(f"{tenant.service.url}{WEFT}/requests/{request}/waiting")
    reason: str = waits.json()["reason"]
    return reason


async def step(tenant: Tenant, run: str, seq_id: int) -> httpx.Response:
    return await tenant.http.post("/optim_step", json={"model_id": run, "seq_id": seq_id})


async def two_steps(tenant: Tenant) -> str:
    run = await tenant.run()
    return [told(await step(tenant, run, seq_id)) for seq_id in (1, 2)][-1]


async def a_step_ahead(tenant: Tenant) -> str:
    return await fate(tenant, await step(tenant, await tenant.run(), 3))


async def another_model(tenant: Tenant) -> str:
    await tenant.run()
    body = {"session_id": await tenant.session(), "model_seq_id": 0, "base_model": BASE}
    return await fate(tenant, await tenant.http.post("/create_model", json=body))


async def a_wide_model(tenant: Tenant) -> str:
    body = {"session_id": await tenant.session(), "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 9}}
    return told(await tenant.http.post("/create_model", json=body))


async def another_session(tenant: Tenant) -> str:
    await tenant.session()
    return told(await tenant.http.post("/create_session", json={}))


async def metadata(tenant: Tenant) -> str:
    return told(await tenant.http.post("/create_session", json={"user_metadata": {"note": "x" * 50}}))


async def two_samples(tenant: Tenant) -> str:
    of = await sampler(tenant)
    return [told(await ask(tenant, of, seq_id)) for seq_id in (0, 1)][-1]


async def a_wide_sample(tenant: Tenant) -> str:
    body = {
        "sampling_session_id": await sampler(tenant),
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 8},
        "num_samples": 4,
        "topk_sample_logprobs": 5,
    }
    return told(await tenant.http.post("/asample", json=body))


async def two_samplers(tenant: Tenant) -> str:
    body: dict[str, Any] = {"session_id": await tenant.session(), "base_model": BASE}
    made = [
        await tenant.http.post("/create_sampling_session", json=body | {"sampling_session_seq_id": number})
        for number in (0, 1)
    ]
    return told(made[-1])


async def two_records(tenant: Tenant) -> str:
    of, now, service = SamplerId(await sampler(tenant)), tenant.service.clock(), tenant.service
    limits = Limits.of(service.services.runtime.settings)
    for number in range(2):
        new = NewRecord(RequestId(f"{tenant.id[:8]}-{number}"), tenant.id, of, bytes(LEAST_BYTES))
        async with service.database.write() as transaction:
            await record_samples(transaction, [new], limits, now=now, expires_at=now + timedelta(hours=1))
    async with service.database.read() as session:
        kept = select(func.count()).select_from(SampleRecord).where(SampleRecord.tenant_id == tenant.id)
        return f"{await session.scalar(kept)} kept"


async def two_points(tenant: Tenant) -> str:
    url = f"{tenant.service.url}{WEFT}/runs/{await tenant.run()}/points"
    return [
        told(await tenant.http.post(url, json={"points": [{"step": number, "metrics": {"reward": 1.0}}]}))
        for number in (1, 2)
    ][-1]


async def points_of_two_models(tenant: Tenant) -> str:
    points = [{"step": number, "metrics": {"reward": 1.0}} for number in range(1000)]
    found = ""
    for _ in range(2):
        run = await tenant.run()
        found = told(await tenant.http.post(f"{tenant.service.url}{WEFT}/runs/{run}/points", json={"points": points}))
    return found


async def two_webhooks(tenant: Tenant) -> str:
    url = f"{tenant.service.url}{WEFT}/webhooks"
    return [
        told(await tenant.http.put(f"{url}/{name}", json={"url": "https://example.org/"})) for name in ("one", "two")
    ][-1]


async def another_key(tenant: Tenant) -> str:
    return told(await tenant.http.post(f"{tenant.service.url}{WEFT}/keys", json={"role": "member"}))


async def two_kept(tenant: Tenant) -> str:
    """Store two checkpoints, as a trainer does at the end of a save."""
    run, service = await tenant.run(), tenant.service
    for number in range(2):
        new = NewCheckpoint(
            CheckpointId(new_checkpoint_id()), run, Segment.WEIGHTS, f"one-{number}", 7, None, True, None
        )
        limits = Limits.of(service.services.runtime.settings)
        try:
            async with service.database.write() as transaction:
                await hold_count(transaction, Counted.STORAGE, [tenant.id])
                await store_checkpoint(transaction, tenant.id, new, service.clock, limits)
        except StorageFull as full:
            return full.code
    listed = (await tenant.http.get(f"/training_runs/{run}/checkpoints")).json()["checkpoints"]
    return ", ".join(sorted("for ever" if one["expires_at"] is None else "for a time" for one in listed))


async def two_passes(tenant: Tenant) -> str:
    run = await tenant.run()
    return [await fate(tenant, await train(tenant, run, seq_id)) for seq_id in (1, 2)][-1]


async def two_sent(tenant: Tenant) -> str:
    run = await tenant.run()
    return [told(await train(tenant, run, seq_id)) for seq_id in (1, 2)][-1]


async def two_drawn(tenant: Tenant) -> str:
    of = await sampler(tenant)
    return [await fate(tenant, await ask(tenant, of, seq_id)) for seq_id in (0, 1)][-1]


async def two_reads(tenant: Tenant) -> str:
    return [told(await tenant.http.get("/training_runs")) for _ in range(2)][-1]


@dataclass(frozen=True)
class Case:
    """An attempt under limits: its end for a tenant that has them, and for one that has not."""

    attempt: Attempt
    bounded: str
    free: str = "accepted"


QUEUED = WaitReason.EARLIER_OPERATION.value
CASES: dict[tuple[tuple[str, int], ...], Case] = {
    (("pending_operations", 1),): Case(two_steps, "429 too_many_operations"),
    (("pending_bytes", 300),): Case(two_sent, "429 too_many_operations"),
    (("seq_ahead", 1),): Case(a_step_ahead, "failed user", "missing_seq_id"),
    (("open_runs", 1),): Case(another_model, "open_runs", "no_trainer"),
    (("max_rank", 8),): Case(a_wide_model, "403 forbidden"),
    (("sessions", 1),): Case(another_session, "429 too_many_sessions"),
    (("stored_bytes", 13),): Case(two_kept, "storage_full", "for ever, for ever"),
    (("checkpoints", 1),): Case(two_kept, "storage_full", "for ever, for ever"),
    (("metadata_bytes", 20),): Case(metadata, "400 invalid_request"),
    (("pending_samples", 1),): Case(two_samples, "429 too_many_samples"),
    (("sample_tokens", 15),): Case(two_samples, "429 too_many_samples"),
    (("sample_work", 100),): Case(a_wide_sample, "400 invalid_request"),
    (("session_samplers", 1),): Case(two_samplers, "400 invalid_request"),
    (("sample_record_bytes", LEAST_BYTES),): Case(two_records, "1 kept", "2 kept"),
    (("run_metrics", 1),): Case(two_points, "400 invalid_request"),
    (("tenant_metrics", 1500),): Case(points_of_two_models, "400 invalid_request"),
    (("webhooks", 1),): Case(two_webhooks, "400 invalid_request"),
    (("keys", 2),): Case(another_key, "400 invalid_request"),
    (("checkpoint_seconds", 60),): Case(two_kept, "for a time, for a time", "for ever, for ever"),
    (("kept_checkpoints", 1),): Case(two_kept, "for ever", "for ever, for ever"),
    (("train_tokens_per_minute", 60), ("train_tokens_burst", 4)): Case(two_passes, "rate_limit", QUEUED),
    (("sample_tokens_per_minute", 60), ("sample_tokens_burst", 10)): Case(two_drawn, "rate_limit", "no_replica"),
    (("requests_per_minute", 1),): Case(two_reads, "429 over_rate"),
}


def test_every_limit_has_a_case() -> None:
    assert {name for limits in CASES for name, _ in limits} == set(LIMIT_NAMES)


@pytest.mark.parametrize(("limits", "case"), [pytest.param(*one, id=one[0][0][0]) for one in CASES.items()])
async def test_a_tenant_at_its_limit_is_bounded_and_its_neighbour_is_not(
    service: Service, pair: tuple[Tenant, Tenant], limits: tuple[tuple[str, int], ...], case: Case
) -> None:
    """Both ask at the same time."""
    cats, dogs = pair
    async with service.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits=dict(limits), clock=service.clock)
    async with asyncio.timeout(60):
        ends = await asyncio.gather(case.attempt(cats), case.attempt(dogs))
        assert ends == [case.bounded, case.free]
