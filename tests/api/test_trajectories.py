"""The key of a trajectory, by field and by header, on Tinker's and on OpenAI's endpoints."""

import asyncio
import sys
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from api.wire.trajectory import HEADER, MOST_CHARACTERS
from contracts.operations import SampleRequest
from contracts.vocabulary import BaseVocabulary
from store.tables import Operation
from tests.api.conftest import BASE

SECONDS = 60.0


async def trajectories(tenant) -> list[str | None]:
    """The keys of the tenant's samples, as the ledger holds them, oldest first."""
    async with tenant.service.database.read() as session:
        owned = select(Operation.id).where(Operation.tenant_id == tenant.id).order_by(Operation.position)
        operations = await tenant.service.ledger.load(session, list(await session.scalars(owned)))
    samples = [operation.payload for operation in operations]
    return [sample.trajectory for sample in samples if isinstance(sample, SampleRequest)]


async def body(tenant, **fields: Any) -> dict[str, Any]:
    """A sample of the bare base, from a sampler of its own."""
    opened = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = (await tenant.http.post("/create_sampling_session", json=opened)).json()["sampling_session_id"]
    prompt = {"chunks": [{"tokens": [5, 6, 7]}]}
    asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 5}}
    return {**asked, **fields}


@pytest.mark.parametrize(
    ("field", "header", "kept"),
    [(None, None, None), ("mine", None, "mine"), (None, "mine", "mine"), ("field", "header", "field")],
)
async def test_a_key_comes_by_field_or_header(cats, dogs, field: str | None, header: str | None, kept: str) -> None:
    headers = {HEADER: header} if header is not None else {}
    for tenant, given in ((dogs, {}), (cats, {"trajectory": field})):
        answer = await tenant.http.post("/asample", json=await body(tenant, **given), headers=headers if given else {})
        assert answer.status_code == 200, answer.text
    assert (await trajectories(cats), await trajectories(dogs)) == ([kept], [None])


@pytest.mark.parametrize("key", ["", "x" * (MOST_CHARACTERS + 1)])
async def test_a_key_has_bounds(cats, key: str) -> None:
    by_field = await cats.http.post("/asample", json=await body(cats, trajectory=key))
    by_header = await cats.http.post("/asample", json=await body(cats), headers={HEADER: key})
    assert (by_field.status_code, by_header.status_code) == (400, 400)
    assert "trajectory must have 1 to 256 characters" in by_field.text
    assert f"{HEADER} must have" in by_header.text
    assert await trajectories(cats) == []


SDK = f"""
import sys, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2], default_headers_overrides={{"{HEADER}": "mine"}})
sampler = client.create_sampling_client(base_model="{BASE}").result()
sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=5)).result()
"""


async def test_the_sdk_s_own_headers_name_a_trajectory(cats, service) -> None:
    """The sample is not drawn: the program is ended once it is accepted."""
    command = (sys.executable, "-c", SDK, service.url, cats.key)
    asking = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    ended = asyncio.create_task(asking.wait())
    async with asyncio.timeout(SECONDS):
        while not (found := await trajectories(cats)) and not ended.done():
            await asyncio.wait([ended], timeout=0.05)
    asking.kill()
    await ended
    assert found == ["mine"]


async def test_openai_s_cache_key_is_a_trajectory(cats, service) -> None:
    letters = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    service.services.vocabularies[BASE] = letters
    asked = {"model": BASE, "prompt": [5, 6, 7], "prompt_cache_key": "mine"}
    async with httpx.AsyncClient(base_url=service.url, headers={"X-API-Key": cats.key}, timeout=SECONDS) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=asked))
        async with asyncio.timeout(SECONDS):
            while not (found := await trajectories(cats)):
                await asyncio.wait([asking], timeout=0.02)
        asking.cancel()
        await asyncio.wait([asking])
    assert found == ["mine"]
