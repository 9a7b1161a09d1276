"""Every route under each mode of suspension that refuses: a route that is new falls under the rule by itself."""

from collections.abc import AsyncIterator, Mapping
from datetime import timedelta

import httpx
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute, iter_route_contexts

from contracts.vocabulary import BaseVocabulary
from store.settings import Settings
from tenants.rights import KeyRights, Role, SuspendMode
from tenants.suspensions import resume_tenant, suspend_tenant
from tests.api.conftest import BASE, Tenant, as_administrator
from tests.api.rights_matrix import ANY, CALLS, Call
from tests.api.test_audit import named
from tests.api.worlds import World, opened_world, send

ADMIN = KeyRights(role=Role.ADMIN)

_KEY = "/api/weft/v1/keys/{key}"
FURTHER = (
    Call("POST", "/api/weft/v1/imports?base_model=test/tiny&name=theirs", ANY),
    Call("GET", "/api/weft/v1/imports/received", ANY, status=400),
    Call("PUT", "/api/weft/v1/projects/{archive}/limits", ANY, {"limits": {"sessions": 5}}),
    Call("POST", "/api/weft/v1/webhooks/bell/events/{nothing}/retry", ANY, status=404),
    Call("GET", "/api/v1/samples/{request}", ANY, status=404),
    Call("GET", "/api/weft/v1/jobs/{nothing}", ANY, status=404),
    Call("DELETE", "/api/weft/v1/jobs/{nothing}", ANY, status=404),
    Call("PUT", _KEY + "/limits", ANY, {"limits": {"train_tokens_per_minute": 60}}),
    Call("POST", _KEY + "/rotate", ANY, {}, status=201),
    Call("DELETE", _KEY, ANY, status=204),
    Call("DELETE", "/api/v1/auth/apikey/me", ANY, status=204),
)
"""Requests to the routes that are not in the matrix of rights; the last one ends its own key."""

_CLIENT = "what a client sends that reads"
_ENDS = "it ends, frees or takes back something"
_READS = "it reads"
_ITSELF = "a repeat of what was accepted finds it; new work is refused by the endpoint"
_RUN = "/api/v1/training_runs/*/checkpoints/*/*"
GO_ON: Mapping[str, str] = {
    "POST /api/v1/create_session": _CLIENT,
    "POST /api/v1/session_heartbeat": _CLIENT,
    "POST /api/v1/join_sampling_session": _CLIENT,
    "POST /api/v1/auth/token": _CLIENT,
    "POST /api/v1/telemetry": _CLIENT,
    "POST /api/v1/client/config": _CLIENT,
    "POST /api/v1/client/dynamic_config": _CLIENT,
    "POST /api/v1/retrieve_future": _READS,
    "POST /api/v1/retrieve_futures": _READS,
    "POST /api/v1/sessions/search": _READS,
    "POST /api/v1/get_info": _READS,
    "POST /api/v1/weights_info": _READS,
    "POST /api/v1/cancel_future": _ENDS,
    "POST /api/v1/unload_model": _ENDS,
    "POST /api/v1/sessions/*/finish": _ENDS,
    "POST /api/v1/adapters/*/resume": _ENDS,
    "POST /api/weft/v1/checkpoints/delete": _ENDS,
    "POST /api/weft/v1/keys/*/rotate": "a key that has leaked is replaced",
}
"""Requests, neither ``GET`` nor ``DELETE``, of a read-only tenant that are answered as ever, each with its reason."""
THEMSELVES: Mapping[str, str] = {
    "POST /api/v1/create_model": _ITSELF,
    "POST /api/v1/create_sampling_session": _ITSELF,
    "POST /api/v1/create_custom_loss": _ITSELF,
    "POST /api/v1/asample": _ITSELF,
    "POST /api/v1/stream_sample": _ITSELF,
    "POST /v1/completions": _ITSELF,
    "POST /v1/chat/completions": _ITSELF,
    "POST /api/weft/v1/imports": _ITSELF,
}
_LANES = (
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
)
FAIL = {f"POST /api/v1/{path}" for path in (*_LANES, "load_weights")}
"""Operations of a run's lane, which fail there, so that their numbers are used up."""


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=10)})


@pytest_asyncio.fixture
async def world(service, cats, dogs) -> AsyncIterator[World]:
    chat = BaseVocabulary(frozenset(), decode=lambda tokens: "x" * len(tokens), chat=lambda messages, tools: [7])
    service.services.vocabularies[BASE] = chat
    async with opened_world(service, cats, dogs) as made:
        yield made


async def _suspend(world: World, mode: SuspendMode) -> None:
    async with world.service.database.write() as transaction:
        now = world.service.clock()
        await suspend_tenant(transaction, name="cats", reason="unpaid", now=now, mode=mode)


async def _ids(world: World) -> dict[str, str]:
    """The tenant's ids, with the number of a key that requests may end."""
    http = await world.client(ADMIN)
    key = str((await http.get("/api/v1/auth/apikey/me")).json()["key_id"])
    return {**world.own, "key": key, "archive": "archive", "nothing": "none"}


def _is_suspended(answer: httpx.Response) -> bool:
    told = answer.json() if answer.status_code == 403 else {}
    told = told.get("error", told)
    return told.get("code") == "suspended" and "unpaid" in str(told.get("detail", told.get("message")))


def test_every_route_is_asked_by_the_tests_of_suspensions(service) -> None:
    found = set()
    for context in iter_route_contexts(service.app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute)
        if route.include_in_schema:
            found |= {named(method, context.path or "") for method in route.methods - {"GET", "HEAD"}}
    asked = {named(call.method, call.path) for call in (*CALLS, *FURTHER)}
    assert found <= asked
    assert GO_ON.keys() | THEMSELVES.keys() | FAIL <= found
    assert not GO_ON.keys() & THEMSELVES.keys()


async def test_a_blocked_tenant_is_refused_every_request_and_nothing_of_it_changes(world: World) -> None:
    http, ids = await world.client(ADMIN), await _ids(world)
    await _suspend(world, SuspendMode.BLOCKED)
    before = await world.counts()
    for call in (*CALLS, *FURTHER):
        answer = await send(http, call, ids, 1)
        assert _is_suspended(answer), (call, answer.status_code, answer.text)
    assert await world.counts() == before
    async with world.service.database.write() as transaction:
        await resume_tenant(transaction, name="cats", now=world.service.clock())
    await _goes_through(http, world.own)


async def test_a_read_only_tenant_reads_and_ends_and_is_refused_every_other_change(world: World, dogs: Tenant) -> None:
    """A second tenant's requests are answered as ever."""
    http, ids = await world.client(ADMIN), await _ids(world)
    (await http.put("/api/weft/v1/webhooks/bell", json={"url": "https://bell.example/"})).raise_for_status()
    await _suspend(world, SuspendMode.READ_ONLY)
    refused = set()
    for call in (*CALLS, *FURTHER):
        before, name = await world.counts(), named(call.method, call.path)
        answer = await send(http, call, ids, 1)
        goes_on = call.method in ("GET", "DELETE") or name in GO_ON
        if goes_on:
            assert answer.status_code == call.status, (name, answer.status_code, answer.text)
        elif name in FAIL and "model_id" in (call.body or {}):
            failed = await http.post("/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]})
            assert (failed.status_code, failed.json()["category"]) == (200, "user"), name
            assert "read-only" in failed.json()["error"], name
            assert "unpaid" in failed.json()["error"], name
        else:
            assert _is_suspended(answer), (name, answer.status_code, answer.text)
            assert await world.counts() == before, name
            refused.add(name)
    assert len(refused) > 20
    theirs = await as_administrator(dogs)
    async with httpx.AsyncClient(base_url=world.service.url, headers=theirs.http.headers, timeout=40) as other:
        await _goes_through(other, world.other_tenant)


async def _goes_through(http: httpx.AsyncClient, ids: Mapping[str, str]) -> None:
    for call in CALLS:
        if not call.is_followed:
            answer = await send(http, call, dict(ids), 1)
            assert answer.status_code == call.status, (call, answer.text)
