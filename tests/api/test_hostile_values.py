"""Values that Python, SQLite or PostgreSQL cannot hold get an answer below 500, and the next request its own."""

import json
from typing import Any

import httpx
import pytest

from tests.api.conftest import Service, Tenant

HUGE, DIGITS = 10**4000, "9" * 5000
TEXTS = ["a\0b", "\ud800", "\U0001f600" * 100, "x" * 60_000]
NUMBERS = ["1e400", "-1e400", "NaN", "Infinity", str(HUGE), str(2**63), str(-(2**63) - 1), "1e308"]


def fields(run: str, session: str) -> dict[str, list[dict[str, Any]]]:
    """Bodies by path, with ``?`` where a value goes."""
    lora = {"rank": 8, "seed": "?"}
    return {
        "/create_session": [{"user_metadata": {"x": "?"}}, {"tags": ["?"]}, {"display_name": "?"}],
        "/create_model": [{"session_id": session, "model_seq_id": "?", "base_model": "test/tiny", "lora_config": lora}],
        "/session_heartbeat": [{"session_id": "?"}],
        f"/sessions/{session}/finish": [{"reason": {"type": "?"}, "detail": "?"}],
        "/get_info": [{"model_id": "?"}],
        "/retrieve_future": [{"request_id": "?"}],
        "/create_sampling_session": [{"session_id": session, "sampling_session_seq_id": "?", "base_model": "?"}],
        "/asample": [{"sampling_session_id": "?", "seq_id": "?", "prompt": {"chunks": [{"tokens": ["?"]}]}}],
        "/optim_step": [{"model_id": run, "seq_id": "?", "adam_params": {"learning_rate": "?"}}],
        "/save_weights": [{"model_id": run, "seq_id": "?", "path": "?", "ttl_seconds": "?"}],
        "/save_weights_for_sampler": [{"model_id": run, "seq_id": 5, "sampling_session_seq_id": "?", "x": "?"}],
        "/load_weights": [{"model_id": run, "seq_id": "?", "path": "?"}],
        "/weights_info": [{"tinker_path": "?"}],
        f"/adapters/{run}/pause": [{"reason": "?", "ttl_seconds": "?", "timeout_seconds": 0}],
        f"/adapters/{run}/resume": [{"generation": "?"}],
        f"/adapters/{run}/reload": [{"path": "?"}],
    }


@pytest.mark.parametrize("value", [*(json.dumps(text) for text in TEXTS), *NUMBERS, "[]", "{}", "null", "true"])
async def test_no_value_of_any_field_is_answered_5xx(cats: Tenant, dogs: Tenant, value: str) -> None:
    run, session = await cats.run(), await cats.session()
    theirs = await dogs.session()
    for path, bodies in fields(run, session).items():
        for body in bodies:
            content = json.dumps(body).replace('"?"', value).encode()
            answer = await cats.http.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (path, content[:200], answer.text)
    for path in (f"/sessions/{session}", f"/adapters/{run}", "/sessions", "/training_runs", "/checkpoints"):
        assert (await cats.http.get(path)).status_code < 500
    assert (await dogs.http.post("/session_heartbeat", json={"session_id": theirs})).status_code == 200


@pytest.mark.parametrize("limit", [str(HUGE), DIGITS, "-" + DIGITS, "1e400", "NaN", "%00", "%ff", "\u0663"])
async def test_no_number_in_a_query_or_path_is_answered_5xx(cats: Tenant, limit: str) -> None:
    for path in ("sessions", "training_runs", "checkpoints"):
        assert (await cats.http.get(f"/{path}?limit={limit}&offset={limit}")).status_code < 500
        assert (await cats.http.get(f"/{path}/{limit}")).status_code < 500


@pytest.mark.parametrize("version", [DIGITS + "." + DIGITS, "0." + DIGITS, "", "\u00b2.\u00b3", "0.27"])
async def test_no_version_of_an_sdk_is_answered_5xx(service: Service, cats: Tenant, version: str) -> None:
    headers = {"X-API-Key": cats.key.encode(), "X-Stainless-Package-Version": version.encode("latin-1")}
    async with httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers=headers, timeout=40) as http:  # type: ignore[arg-type]
        assert (await http.get("/checkpoints")).status_code == 200
        assert (await http.get("/auth/apikey/me")).status_code == 200
