"""A tenant that runs into a limit is told so in the SDK's own way, and its neighbour does not notice."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
import zstandard

from contracts.operations import OptimStepped
from store.settings import Settings
from tenants.limits import set_tenant
from tests.api.conftest import BASE, Service, Tenant
from tests.api.test_back_pressure import ask, sampler


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Requests without room are answered at once."""
    return settings.model_copy(update={"poll_hold": timedelta(seconds=0.01)})


async def limit(service: Service, tenant: str, **limits: int) -> None:
    """Set a tenant's own limits, as ``weft tenant set`` does."""
    async with service.database.write() as transaction:
        await set_tenant(transaction, name=tenant, limits=limits)


async def step(tenant: Tenant, run: str, seq_id: int) -> httpx.Response:
    """One more optimizer step."""
    return await tenant.http.post("/optim_step", json={"model_id": run, "seq_id": seq_id})


async def retrieve(tenant: Tenant, answer: httpx.Response) -> dict[str, Any]:
    """The outcome of an accepted request."""
    found = await tenant.http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})
    content: dict[str, Any] = found.json()
    return content


async def test_training_beyond_the_limit_is_told_to_come_again_and_is_then_accepted(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await limit(service, "cats", pending_operations=2)
    mine, theirs = await cats.run(), await dogs.run()
    assert [(await step(cats, mine, seq_id)).status_code for seq_id in (1, 2)] == [200, 200]
    refused = await step(cats, mine, 3)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_operations")
    assert refused.headers["retry-after"] == "5"
    assert "takes 2 of 2 operations" in refused.json()["detail"]
    assert [(await step(dogs, theirs, seq_id)).status_code for seq_id in (1, 2, 3)] == [200] * 3
    await service.run_next(OptimStepped({}))
    assert (await step(cats, mine, 3)).status_code == 200


async def test_a_seq_id_far_ahead_fails_and_leaves_no_hole(service: Service, cats: Tenant, dogs: Tenant) -> None:
    await limit(service, "cats", seq_ahead=1)
    mine, theirs = await cats.run(), await dogs.run()
    ahead = await step(cats, mine, 3)
    failed = await retrieve(cats, ahead)
    assert failed["category"] == "user"
    assert "seq_id 3 is 2 ahead of seq_id 1" in failed["error"]
    assert (await step(cats, mine, 3)).json() == ahead.json()
    for seq_id in (1, 2):
        assert (await step(cats, mine, seq_id)).status_code == 200
        await service.run_next(OptimStepped({}))
    # 3 has failed, so 4 is the next one.
    last = await step(cats, mine, 4)
    await service.run_next(OptimStepped({}))
    assert "error" not in await retrieve(cats, last)
    assert (await step(dogs, theirs, 3)).status_code == 200
    assert "try_again" in (await retrieve(dogs, await step(dogs, theirs, 3)))["type"]


async def test_metadata_that_expands_is_refused_before_it_is_stored(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    """Two kilobytes of zstd hold megabytes of text."""
    large = {"note": "x" * 90_000}
    session, run = await cats.session(), await cats.run()
    creation = {"session_id": session, "model_seq_id": 7, "base_model": BASE, "user_metadata": large}
    requests = {"/create_session": {"user_metadata": large}, "/create_model": creation}
    for path, body in requests.items():
        packed = zstandard.compress(httpx.Request("POST", "http://x", json=body).content)
        assert len(packed) < 2000
        headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
        refused = await cats.http.post(path, content=packed, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
        assert "user_metadata takes 90011 bytes of JSON, and your limit is 16384" in refused.json()["detail"]
    refused = await cats.http.post("/create_session", json={"tags": ["x" * 90_000]})
    assert (refused.status_code, "tags takes 90004 bytes" in refused.json()["detail"]) == (400, True)
    save = {"model_id": run, "seq_id": 1, "path": "a", "user_metadata": large}
    failed = await retrieve(cats, await cats.http.post("/save_weights", json=save))
    assert (failed["category"], "user_metadata takes" in failed["error"]) == ("user", True)
    assert (await dogs.http.post("/create_session", json={"user_metadata": {"note": "x"}})).status_code == 200


async def test_sessions_beyond_the_limit_wait_for_another_to_end(service: Service, cats: Tenant, dogs: Tenant) -> None:
    await limit(service, "cats", sessions=2)
    first = await cats.http.post("/create_session", json={}, headers={"X-Idempotency-Key": "one"})
    assert (await cats.http.post("/create_session", json={})).status_code == 200
    refused = await cats.http.post("/create_session", json={})
    assert (refused.status_code, refused.json()["code"], refused.headers["retry-after"]) == (
        429,
        "too_many_sessions",
        "10",
    )
    again = await cats.http.post("/create_session", json={}, headers={"X-Idempotency-Key": "one"})
    assert again.json() == first.json()
    assert (await dogs.http.post("/create_session", json={})).status_code == 200
    await cats.http.post(f"/sessions/{first.json()['session_id']}/finish", json={})
    assert (await cats.http.post("/create_session", json={})).status_code == 200


async def test_samplers_beyond_a_sessions_limit_are_refused_and_a_new_session_takes_more(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await limit(service, "cats", session_samplers=2)

    async def sampler(tenant: Tenant, session: str, number: int) -> httpx.Response:
        body = {"session_id": session, "sampling_session_seq_id": number, "base_model": BASE}
        return await tenant.http.post("/create_sampling_session", json=body)

    mine, another, theirs = await cats.session(), await cats.session(), await dogs.session()
    made = [await sampler(cats, mine, number) for number in (0, 1)]
    refused = await sampler(cats, mine, 2)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    assert "has 2 samplers, which is your limit for one session" in refused.json()["detail"]
    assert (await cats.http.get(f"/samplers/{mine}:sample:2")).status_code == 404
    assert (await sampler(cats, mine, 1)).json() == made[1].json()
    assert (await sampler(cats, another, 0)).status_code == 200
    assert [(await sampler(dogs, theirs, number)).status_code for number in (0, 1, 2)] == [200] * 3


async def test_standing_tells_what_the_limits_count(service: Service, cats: Tenant, dogs: Tenant) -> None:
    await limit(service, "cats", pending_operations=2)
    run = await cats.run()
    await step(cats, run, 1)
    await step(cats, run, 2)
    await cats.checkpoint(run, "first")

    async def standing(tenant: Tenant) -> dict[str, dict[str, Any]]:
        answer = await tenant.http.get(f"{service.url}/api/weft/v1/usage/standing")
        return {one["name"]: one for one in answer.json()["limits"]}

    mine, theirs = await standing(cats), await standing(dogs)
    pending = mine["pending_operations"]
    assert (pending["value"], pending["used"], pending["is_reached"], pending["is_own"]) == (2, 2, True, True)
    assert "429" in pending["reason"]
    assert mine["pending_bytes"]["used"] > 0
    assert {name: mine[name]["used"] for name in ("open_runs", "sessions", "stored_bytes", "checkpoints")} == {
        "open_runs": 1,
        "sessions": 1,
        "stored_bytes": 7,
        "checkpoints": 1,
    }
    assert mine["seq_ahead"]["used"] is None
    assert theirs.pop("keys")["used"] == 1
    assert {one["used"] for one in theirs.values()} == {0, None}
    assert theirs["pending_operations"]["value"] == Settings().limit_pending_operations


async def test_a_model_beyond_the_limit_is_accepted_and_told_why_it_waits(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    await limit(service, "cats", open_runs=1)
    for tenant in (cats, dogs):
        await tenant.run()
    creation = {"session_id": await cats.session(), "model_seq_id": 0, "base_model": BASE}
    waiting = await retrieve(cats, await cats.http.post("/create_model", json=creation))
    assert waiting["queue_state"] == "paused_capacity"
    assert "you have 1 models open, and your limit is 1" in waiting["queue_state_reason"]
    creation["session_id"] = await dogs.session()
    beside = await retrieve(dogs, await dogs.http.post("/create_model", json=creation))
    assert "no trainer" in beside["queue_state_reason"]


async def test_limits_that_are_lowered_below_their_use_end_nothing_and_hold_back_what_is_new(
    service: Service, cats: Tenant, dogs: Tenant
) -> None:
    runs = [await cats.run(), await cats.run()]
    theirs = await dogs.run()
    await cats.checkpoint(runs[0], "kept")
    asked = [await step(cats, run, seq_id) for run in runs for seq_id in (1, 2)]
    draws = await sampler(cats)
    drawing = [await ask(cats, draws, seq_id) for seq_id in range(2)]
    await limit(service, "cats", open_runs=1, sessions=1, pending_operations=1, pending_samples=1, stored_bytes=1)
    assert (await step(cats, runs[0], 3)).status_code == 429
    assert (await ask(cats, draws, 2)).status_code == 429
    assert (await cats.http.post("/create_session", json={})).status_code == 429
    assert (await step(dogs, theirs, 1)).status_code == 200
    # Each was accepted before: it is there, waits for its turn, and ends well.
    assert {(await retrieve(cats, one))["type"] for one in (*asked, *drawing)} == {"try_again"}
    for _ in range(2):
        await service.run_next(OptimStepped({}))
    assert ["error" in await retrieve(cats, one) for one in asked] == [False] * 4
    listed = (await cats.http.get(f"/training_runs/{runs[0]}/checkpoints")).json()["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/kept"]
    assert [(await step(cats, run, 3)).status_code for run in runs] == [200, 429]
    await service.run_next(OptimStepped({}))
    assert (await step(cats, runs[1], 3)).status_code == 200
