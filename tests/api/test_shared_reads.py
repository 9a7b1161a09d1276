"""Entries of two tenants' audit logs when one uses the other's checkpoints: published ones, and with a key."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import func, select

from contracts.paths import Segment
from contracts.vocabulary import BaseVocabulary
from store.tables import AuditEntry, Operation
from tenants.keys import create_key
from tenants.rights import KeyRights, Role
from tests.api.conftest import BASE, Tenant

SHARED = {Segment.WEIGHTS: "tinker://{}/weights/one", Segment.SAMPLER_WEIGHTS: "tinker://{}/sampler_weights/one"}


async def admin(tenant: Tenant, **rights: Any) -> str:
    """Secret of a new admin's key of the tenant."""
    async with tenant.service.database.write() as transaction:
        given = KeyRights(role=Role.ADMIN, **rights)
        made = await create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=given)
    return made.secret


async def told(tenant: Tenant, query: str = "") -> list[dict[str, Any]]:
    """Entries of the tenant's log about uses, as the tenant reads them, the oldest first."""
    await tenant.service.services.audit_tally.write()
    path = f"{tenant.service.url}/api/weft/v1/audit?action=checkpoint_read&action=run_load{query}"
    answer = await tenant.http.get(path, headers={"X-API-Key": await admin(tenant)})
    found: list[dict[str, Any]] = answer.raise_for_status().json()["entries"]
    return found[::-1]


async def uses(tenant: Tenant) -> list[tuple[str, str, str, int]]:
    """Actor, checkpoint, purpose and count of each entry in the log of the checkpoint's tenant."""
    shown = [one for one in await told(tenant) if one["action"] == "checkpoint_read"]
    assert {(one["door"], one["address"], one["outcome"]) for one in shown} <= {("share", None, "done")}
    return [(one["actor"], one["resource_id"], one["after"]["cause"], one["after"]["count"]) for one in shown]


@pytest_asyncio.fixture
async def source(cats: Tenant) -> str:
    """A run of cats' with a checkpoint of each kind."""
    run = await cats.run()
    for segment in SHARED:
        await cats.checkpoint(run, "one", segment=segment)
    return run


async def samples_of(tenant: Tenant) -> int:
    """Number of the tenant's samples in the ledger."""
    async with tenant.service.database.read() as session:
        own = select(func.count()).select_from(Operation).where(Operation.tenant_id == tenant.id)
        return int(await session.scalar(own) or 0)


async def publish(cats: Tenant, run: str) -> None:
    for segment in SHARED:
        answer = await cats.http.post(f"/training_runs/{run}/checkpoints/{segment}/one/publish")
        assert answer.status_code == 204


async def load(tenant: Tenant, run: str, seq_id: int, source: str, token: str | None = None) -> None:
    """Load a checkpoint into a run, and send the request once more."""
    body = {"model_id": run, "seq_id": seq_id, "path": SHARED[Segment.WEIGHTS].format(source), "optimizer": False}
    for _ in range(2):
        await tenant.http.post("/load_weights", json=body | {"weights_access_token": token})


@pytest.mark.parametrize("is_by_key", [True, False])
async def test_a_load_into_a_run_is_told_in_both_logs_and_a_repeat_in_none(
    cats: Tenant, dogs: Tenant, source: str, is_by_key: bool
) -> None:
    key = await admin(cats) if is_by_key else None
    if key is None:
        await publish(cats, source)
    run, path = await dogs.run(), SHARED[Segment.WEIGHTS].format(source)
    for seq_id in (1, 2):
        await load(dogs, run, seq_id, source, key)
    await load(cats, await cats.run(), 1, source)
    assert await uses(cats) == [("another tenant" if key is None else key[:16], path, "load", 2)]
    mine = [(one["action"], one["resource_id"], one["actor"], one["after"]) for one in await told(dogs)]
    assert mine == [("run_load", run, dogs.key[:16], {"from": path})] * 2
    assert dogs.key[:16] not in json.dumps(await told(cats))


async def test_a_new_run_and_a_copy_are_told_to_the_owner_with_the_key_that_was_sent(
    cats: Tenant, dogs: Tenant, source: str
) -> None:
    key, path = await admin(cats), SHARED[Segment.WEIGHTS].format(source)
    made = {"session_id": await dogs.session(), "model_seq_id": 1, "seq_id": 0, "path": path}
    for _ in range(2):
        answer = await dogs.http.post("/load_weights", json=made | {"weights_access_token": key})
        answer.raise_for_status()
        copied = {"source_path": path, "weights_access_token": key}
        (await dogs.http.post("/copy_weights", json=copied, headers={"X-Idempotency-Key": "k"})).raise_for_status()
    (await cats.http.post("/copy_weights", json={"source_path": path})).raise_for_status()
    assert sorted(await uses(cats)) == [(key[:16], path, "copy", 1), (key[:16], path, "load", 1)]
    assert [one["action"] for one in await told(dogs)] == []


async def test_samples_are_counted_on_both_wires_and_the_owners_own_are_not(
    cats: Tenant, dogs: Tenant, source: str
) -> None:
    await publish(cats, source)
    path, bodies = SHARED[Segment.SAMPLER_WEIGHTS].format(source), []
    for tenant in (dogs, cats):
        opening = {"session_id": await tenant.session(), "sampling_session_seq_id": 0, "model_path": path}
        opened = (await tenant.http.post("/create_sampling_session", json=opening)).raise_for_status().json()
        bodies.append({"sampling_session_id": opened["sampling_session_id"], "num_samples": 1})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    for tenant, body in zip((dogs, cats), bodies, strict=True):
        for seq_id in (0, 1, 1):
            sample = body | {"seq_id": seq_id, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
            (await tenant.http.post("/asample", json=sample)).raise_for_status()
    letters = BaseVocabulary(frozenset(), encode=lambda text: [7] * len(text), decode=lambda tokens: "x" * len(tokens))
    cats.service.services.vocabularies[BASE] = letters
    asked = {"model": path, "prompt": [1, 2], "max_tokens": 2}
    asking = asyncio.create_task(dogs.http.post(f"{dogs.service.url}/v1/completions", json=asked))
    async with asyncio.timeout(60):
        while await samples_of(dogs) < 3:
            await asyncio.wait([asking], timeout=0.02)
            assert not asking.done(), asking.result().text
    asking.cancel()
    await asyncio.wait([asking])
    assert await uses(cats) == [("another tenant", path, "sample", 3)]
    assert await told(dogs) == []


async def test_another_tenant_is_neither_named_nor_found_and_crowds_out_nothing(
    cats: Tenant, dogs: Tenant, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators read who it was. Many keys of another tenant take none of the owner's own places in a minute."""
    monkeypatch.setattr("tenants.audit_tally._MOST_KINDS", 3)
    await publish(cats, source)
    path = SHARED[Segment.WEIGHTS].format(source)
    for number in range(5):
        key = await admin(dogs)
        headers = {"X-API-Key": key, "X-Idempotency-Key": str(number)}
        (await dogs.http.post("/copy_weights", json={"source_path": path}, headers=headers)).raise_for_status()
    own = await admin(cats)
    for _ in range(2):
        usage = f"{cats.service.url}/api/weft/v1/usage?since=2026-01-01T00:00:00Z"
        (await cats.http.get(usage, headers={"X-API-Key": own})).raise_for_status()
    shown = await uses(cats)
    assert (len(shown), sum(count for *_, count in shown)) == (4, 5)
    assert {(actor, purpose) for actor, _, purpose, _ in shown} == {("another tenant", "copy")}
    async with cats.service.database.read() as session:
        rows = list(await session.scalars(select(AuditEntry).where(AuditEntry.door == "share")))
        read = await session.scalar(select(AuditEntry.actor).where(AuditEntry.action == "usage_read"))
    assert read == own[:16]
    names = {row.actor for row in rows} - {"other keys"}
    assert (len(names), {row.address for row in rows}) == (3, {"127.0.0.1", None})
    assert await told(cats, f"&key={sorted(names)[0]}") == []
    for path in ("/api/weft/v1/audit", "/api/v1/audit?day=2026-01-01"):
        text = (await cats.http.get(f"{cats.service.url}{path}", headers={"X-API-Key": own})).text
        assert not [name for name in names if name in text]
