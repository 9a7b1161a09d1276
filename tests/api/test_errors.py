import logging
import subprocess
import sys

import httpx
import pytest
from sqlalchemy import text
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from api.errors import InternalErrorGuard
from contracts import errors
from tests.ledger_heads import ready_heads


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nothing"),
        ("POST", "/training_runs"),
        ("GET", "/create_session"),
        ("POST", "/telemetry/"),
        ("GET", "/"),
    ],
)
async def test_unknown_route_is_a_final_json_404(cats, method: str, path: str) -> None:
    response = await cats.http.request(method, path)
    assert (response.status_code, response.json()["code"]) == (404, "not_implemented")
    assert response.json()["retryable"] is False


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/embeddings"), ("DELETE", "/v1/models"), ("POST", "/v1/")])
async def test_unknown_route_beside_openais_is_told_in_openais_form(cats, method: str, path: str) -> None:
    response = await cats.http.request(method, f"{cats.service.url}{path}")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("not_found_error", "not_implemented")
    assert f"{method} {path}" in error["message"]
    assert "detail" in (await cats.http.get(f"{cats.service.url}/v1x")).json(), "weft's own form elsewhere"


async def test_a_refused_external_save_takes_its_seq_id_and_fails_as_a_future(cats, dogs, service) -> None:
    run = await cats.run()
    body = {"model_id": run, "path": "x", "seq_id": 1, "age_encryption_recipients": ["nobody"]}
    assert (await dogs.http.post("/save_weights_external", json=body)).status_code == 404
    promises = [(await cats.http.post("/save_weights_external", json=body)).json() for _ in range(2)]
    assert promises[0] == promises[1]
    future = (await cats.http.post("/retrieve_future", json={"request_id": promises[0]["request_id"]})).json()
    assert future["category"] == "user"
    await cats.operation(run, seq_id=2)
    async with service.database.read() as session:
        assert [one.seq_id for one in await ready_heads(service.ledger, session, "test/tiny")] == [2]


async def test_malformed_json_is_400(cats) -> None:
    response = await cats.http.post("/retrieve_future", content=b"{not json")
    assert (response.status_code, response.json()["code"]) == (400, "invalid_request")


async def test_body_over_the_limit_is_413_and_the_service_goes_on(cats, settings) -> None:
    body = b'{"request_id":"' + b"x" * settings.max_body_bytes + b'"}'
    response = await cats.http.post("/retrieve_future", content=body)
    assert (response.status_code, response.json()["code"]) == (413, "payload_too_large")
    assert (await cats.http.post("/client/config", json={})).status_code == 200


async def test_broken_database_is_a_bare_500(cats, service, caplog) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(text("ALTER TABLE samplers RENAME TO elsewhere"))
    session_id = await cats.session()
    with caplog.at_level(logging.ERROR, logger="api.errors"):
        response = await cats.http.get(f"/sessions/{session_id}")
    assert (response.status_code, response.json()["code"], response.json()["retryable"]) == (
        500,
        "internal_error",
        True,
    )
    assert "samplers" not in response.text
    assert "no such table" in caplog.text


async def test_exception_after_the_answer_began_is_not_answered_twice() -> None:
    async def half(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("late")

    sent = []

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/"}
    with pytest.raises(RuntimeError, match="late"):
        await InternalErrorGuard(half)(scope, None, send)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


def test_no_final_error_has_a_status_that_the_sdk_retries() -> None:
    def tree(root: type[errors.WeftError]) -> list[type[errors.WeftError]]:
        return [root, *(leaf for child in root.__subclasses__() for leaf in tree(child))]

    stored_only = (errors.WeftError, *tree(errors.EngineFailure))
    for error in tree(errors.WeftError):
        if error in tree(errors.OverLimit):
            # Back-pressure is the SDK's to repeat: it is not final.
            assert (error.status, error.retryable) == (429, True)
        elif error in (errors.BodyTooSlow, errors.PollAgain):
            # Nor is a body that did not arrive, nor a poll that was not held.
            assert (error.status, error.retryable) == (408, True)
        elif error in (*tree(errors.Unavailable), errors.LeaseLost, errors.OutcomeConflict):
            # Nor is an outage.
            assert (error.status, error.retryable) == (503, True)
        elif error is errors.BudgetSpent:
            # Nor is a spent budget: SDKs that know 402 wait, and others' work is held.
            assert (error.status, error.retryable) == (402, True)
        elif error is errors.TenantHeld:
            # Nor is a hold, which only OpenAI's clients are told by a status.
            assert (error.status, error.retryable) == (429, True)
        elif error is errors.EditConflict:
            # The admin API's own: no SDK calls it.
            assert (error.status, error.retryable) == (412, False)
        elif error not in stored_only:
            assert error.status in (400, 401, 403, 404, 410, 413), error


def test_importing_the_api_leaves_the_engines_libraries_out() -> None:
    heavy = {"torch", "peft", "transformers", "vllm", "tinker"}
    code = f"import api.app, sys; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


async def test_guard_passes_answers_through() -> None:
    async def hello(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    app = InternalErrorGuard(Starlette(routes=[Route("/", hello)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft", timeout=40) as http:
        assert (await http.get("/")).text == "hello"
