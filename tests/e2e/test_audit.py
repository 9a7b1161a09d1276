"""A real service's audit log: what a trainer has made is told with the key that asked for it, and steps are not told."""

import uuid

import httpx

from testing.tenants import make_tenants
from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient, pass_message

TOKENS = [72, 101, 108, 108, 111]


def _log(service: Service, key: str) -> list[dict]:
    """Return the entries that a tenant reads, oldest first."""
    headers = {"X-API-Key": key}
    answer = httpx.get(
        f"{service.base_url}/api/weft/v1/audit?limit=1000", headers=headers, timeout=40
    ).raise_for_status()
    entries: list[dict] = answer.json()["entries"]
    return entries[::-1]


def test_what_a_trainer_makes_is_told_with_the_key_and_steps_are_not(service: Service) -> None:
    names = [f"{name}-{uuid.uuid4().hex[:8]}" for name in ("trains", "watches")]
    key, other = make_tenants(service.data, names)
    client = RawClient(service.base_url, key)
    run = client.model(BASE_NAME, client.session())
    for step in range(2):
        computed = client.passes(pass_message(run, 1 + 2 * step, TOKENS))
        client.result(client.step(run, 2 + 2 * step, learning_rate=1e-3))
        client.result(computed)
    client.result(client.post("/save_weights_for_sampler", model_id=run, seq_id=5, sampling_session_seq_id=0))
    saved = client.post("/save_weights", model_id=run, seq_id=6, path="mine", ttl_seconds=3600)
    client.result(saved)
    client.result(client.post("/save_weights", model_id=run, seq_id=7, path="mine", overwrite=True))
    client.result(client.post("/unload_model", model_id=run))
    told = [one for one in _log(service, key) if one["door"] == "key"]
    path = f"tinker://{run}/weights/mine"
    made = [("run_create", run), ("checkpoint_create", path), ("checkpoint_create", path), ("run_unload", run)]
    assert [(one["action"], one["resource_id"]) for one in told] == made
    assert {(one["actor"], one["role"]) for one in told} == {(key[:16], "admin")}
    assert len({one["project_id"] for one in told}) == 1
    assert told[0]["after"] == {"base_model": BASE_NAME, "rank": told[0]["after"]["rank"], "from": None}
    assert told[1]["after"]["ttl_seconds"] == 3600
    assert told[1]["trace_id"] == saved.headers["x-trace-id"]
    assert _log(service, other) == []
    client.close()
