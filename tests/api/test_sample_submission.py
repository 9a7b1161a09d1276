"""Acceptance of a request's samples: its cost in time of the event loop, and the tenant that it counts to."""

import asyncio
from time import monotonic
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select

from api.sample_submission import SampleSubmission
from contracts.codec import pack, request_digest
from contracts.ledger_records import NewOperation
from contracts.operations import OperationKind, Payload
from contracts.vocabulary import BaseVocabulary
from store.repeat import wait_for
from store.tables import Operation
from tests.api.conftest import BASE, Service, Tenant
from tests.api.stalls import no_stall

PROMPTS = 128
PACKING_SECONDS = 0.012
"""Time that a packing takes: all prompts' together are longer than the longest stall."""
PREPARING_SECONDS = 0.2


def busy_for(seconds: float) -> None:
    """Keep the thread busy."""
    ends = monotonic() + seconds
    while monotonic() < ends:
        pass


async def accepted_of(tenant: Tenant) -> int:
    """Return the number of the tenant's operations."""
    async with tenant.service.database.read() as session:
        query = select(func.count()).select_from(Operation).where(Operation.tenant_id == tenant.id)
        return await session.scalar(query) or 0


async def sampler(tenant: Tenant) -> str:
    body = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    answer = await tenant.http.post("/create_sampling_session", json=body)
    return str(answer.raise_for_status().json()["sampling_session_id"])


async def test_a_request_of_many_prompts_has_one_digest_and_leaves_turns_to_others(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.services.vocabularies[BASE] = BaseVocabulary(frozenset(), str)
    digests: list[int] = []

    def counted(kind: OperationKind, body: bytes) -> bytes:
        digests.append(len(body))
        return request_digest(kind, body)

    for module in ("api.openai.generation", "api.sample_submission"):
        monkeypatch.setattr(f"{module}.request_digest", counted, raising=False)

    def slow_pack(payload: Payload) -> bytes:
        busy_for(PACKING_SECONDS)
        return pack(payload)

    monkeypatch.setattr("ledger.payload_files.pack", slow_pack)
    session = await dogs.session()
    body: dict[str, Any] = {"model": BASE, "prompt": [[number] for number in range(PROMPTS)], "max_tokens": 10}
    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(base_url=service.url, headers={"X-API-Key": cats.key}, timeout=60) as client,
        no_stall(),
    ):
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        while await accepted_of(cats) < PROMPTS and not asking.done():
            assert (await dogs.http.post("/session_heartbeat", json={"session_id": session})).status_code == 200
            await wait_for(asyncio.Event(), 0.02)
        asking.cancel()
        await asyncio.wait([asking])
    assert await accepted_of(cats) == PROMPTS
    assert len(digests) == 1


async def test_work_on_a_streamed_sample_counts_to_its_tenants_time(
    service: Service, cats: Tenant, dogs: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream is accepted behind a shield, which a client that leaves does not break; what is computed comes before it."""
    whole, loop_time = SampleSubmission.operation, service.services.admission.loop_time

    async def busy(self: SampleSubmission, *args: Any) -> NewOperation:
        busy_for(PREPARING_SECONDS)
        return await whole(self, *args)

    monkeypatch.setattr(SampleSubmission, "operation", busy)
    charged = dict.fromkeys((cats.id, dogs.id), 0.0)
    mine = await sampler(cats)
    assert (await dogs.http.post("/session_heartbeat", json={"session_id": await dogs.session()})).status_code == 200
    charge = loop_time.charge

    def noted(sender: Any, seconds: float) -> None:
        for tenant in charged:
            with loop_time.used_by(tenant) as its:
                charged[tenant] += seconds * (sender is its)
        charge(sender, seconds)

    monkeypatch.setattr(loop_time, "charge", noted)
    body = {
        "sampling_session_id": mine,
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "sampling_params": {"max_tokens": 50},
    }
    async with cats.http.stream("POST", "/stream_sample", json=body) as answer:
        assert await anext(answer.aiter_lines()) == "event: accepted"
        assert charged[cats.id] >= PREPARING_SECONDS
    assert charged[dogs.id] < PREPARING_SECONDS
