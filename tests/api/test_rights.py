"""Rights of keys: each route declares its scopes, and a request beyond a key's rights is refused and changes no row."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select

from api.authentication import Require
from contracts.vocabulary import BaseVocabulary
from store.settings import Settings
from store.tables import ApiKey, Operation
from tenants.rights import SCOPES_OF_ROLES, TENANT_ROLES, KeyRights, Role, Scope
from tests.api.conftest import Tenant
from tests.api.rights_matrix import ANY, CALLS, ELSEWHERE, Call, filled
from tests.api.test_rates import finish_samples
from tests.api.test_suspensions import completing
from tests.api.worlds import World, opened_world, send

OPEN = ("/healthz", "/readyz", "/api/v1/healthz", "/api/v1/downloads/")
"""Paths that need no key: processes' health, and links that carry a secret of their own."""


OF_WHO_OPENED = ("/finish", "/session_heartbeat")
"""Ends of paths by which a key that may neither train nor sample acts on sessions that it has opened, and on no others."""


def telemetry_of(session: str) -> dict[str, Any]:
    """A body of the SDK's telemetry: a script of the session has died."""
    event = {"event": "UNHANDLED_EXCEPTION", "event_id": "one", "error_type": "KeyError", "error_message": "'x'"}
    return {"session_id": session, "platform": "p", "sdk_version": "s", "events": [{**event, "traceback": "t"}]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=10)})


def _dependencies(dependant: Dependant) -> Iterator[Any]:
    for one in dependant.dependencies:
        yield one.call
        yield from _dependencies(one)


def _routes(service) -> Iterator[tuple[str, APIRoute]]:
    for context in iter_route_contexts(service.app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute), context.path
        yield context.path or "", route


async def test_every_route_declares_its_scopes_once(service) -> None:
    undeclared, seen = [], 0
    for path, route in _routes(service):
        declared = [one for one in _dependencies(route.dependant) if isinstance(one, Require)]
        seen += 1
        if len(declared) != (0 if path.startswith(OPEN) else 1):
            undeclared.append(path)
    assert undeclared == []
    assert seen > 60


async def test_the_matrix_has_every_route(service) -> None:
    paths = {path for path, _ in _routes(service) if not path.startswith(OPEN)}
    asked = {_template(call.path) for call in CALLS} | {_template(path) for path in ELSEWHERE}
    tokenizers = {path for path in paths if "{repository:path}" in path}
    assert {path for path in paths - tokenizers if _template(path) not in asked} == set()


def _template(path: str) -> str:
    """Return the path with all of its ids alike."""
    parts = (
        path.replace("{checkpoint_id:path}", "weights/one")
        .replace("{segment}/{name}", "weights/one")
        .replace("/webhooks/bell", "/webhooks/{name}")
        .partition("?")[0]
        .split("/")
    )
    return "/".join("*" if "{" in part else part for part in parts)


@pytest_asyncio.fixture
async def world(service, cats, dogs) -> AsyncIterator[World]:
    async with opened_world(service, cats, dogs) as made:
        yield made


def _is_allowed(call: Call, scopes: frozenset[Scope]) -> bool:
    return call.needs is ANY or not call.needs.isdisjoint(scopes)


@pytest.mark.parametrize("role", TENANT_ROLES)
async def test_a_role_may_what_its_scopes_say_and_nothing_else(world: World, role: Role) -> None:
    """A refusal is 403 at once, by scope alone, whoever owns the row, and changes no row."""
    http = await world.client(KeyRights(role=role))
    scopes = SCOPES_OF_ROLES[role]
    refused = [call for call in CALLS if not _is_allowed(call, scopes)]
    before = await world.counts()
    for call in refused:
        for ids in (world.own, world.other_project, world.other_tenant):
            answer = await send(http, call, ids, 0)
            assert answer.status_code == 403, (role, call, answer.text)
            assert "forbidden" in answer.text
    assert await world.counts() == before
    foreign = [call for call in CALLS if call.names and _is_allowed(call, scopes)]
    for call in foreign:
        answer = await send(http, call, {**world.other_tenant, "project": world.own["project"]}, 0)
        assert answer.status_code == 404, (role, call, answer.text)
    assert await world.counts() == before
    for call in CALLS:
        if _is_allowed(call, scopes) and not (role is Role.VIEWER and call.path.endswith(OF_WHO_OPENED)):
            if (call.path.startswith("/v1/") and call.method == "POST") or "stream_sample" in call.path:
                continue
            answer = await send(http, call, world.own, 1)
            assert answer.status_code == call.status, (role, call, answer.text)


async def test_a_key_of_a_project_deletes_many_checkpoints_of_that_project_alone(world: World) -> None:
    http = await world.client(KeyRights(projects=frozenset({world.project})))
    own, archived, foreign = (
        f"tinker://{ids['run']}/weights/one" for ids in (world.own, world.other_project, world.other_tenant)
    )
    deleted = await http.post("/api/weft/v1/checkpoints/delete", json={"paths": [own, archived, foreign]})
    assert deleted.json() == {"deleted": 1, "missing": [own, foreign]}
    kept = (await (await world.client(KeyRights())).get("/api/v1/checkpoints")).json()["checkpoints"]
    assert (own in str(kept), archived in str(kept)) == (True, False)


async def test_a_key_of_a_project_reaches_that_project_alone(world: World) -> None:
    http = await world.client(KeyRights(role=Role.ADMIN, projects=frozenset({world.project})))
    before = await world.counts()
    for call in CALLS:
        if call.names:
            for ids in (world.own, world.other_tenant):
                answer = await send(http, call, {**ids, "project": world.project}, 0)
                assert answer.status_code == 404, (call, answer.text)
    assert await world.counts() == before
    lists = {
        "/api/v1/sessions": world.own["session"],
        "/api/v1/training_runs": world.own["run"],
        "/api/v1/checkpoints": world.own["run"],
        "/v1/models": world.own["run"],
        "/api/weft/v1/adapters": world.own["run"],
        "/api/weft/v1/checkpoints": world.own["run"],
        "/api/weft/v1/operations": world.own["run"],
        "/api/weft/v1/projects": world.tenant.id,
    }
    for path, hidden in lists.items():
        shown = (await http.get(path)).raise_for_status().text
        assert hidden not in shown, path
    assert world.other_project["run"] in (await http.get("/api/v1/training_runs")).text
    made = (await http.post("/api/v1/create_session", json={})).raise_for_status().json()["session_id"]
    assert (await http.get(f"/api/v1/sessions/{made}")).json()["project_id"] == world.project
    for call in CALLS:
        if (call.path.startswith("/v1/") and call.method == "POST") or "stream_sample" in call.path:
            continue
        if call.path == "/api/weft/v1/projects":
            continue
        if "/webhooks" in call.path:
            # A webhook tells of the whole tenant.
            assert (await send(http, call, world.own, 2)).status_code == 403, call
            continue
        answer = await send(http, call, world.other_project, 2)
        assert answer.status_code == call.status, (call, answer.text)


async def test_scopes_narrow_a_role(world: World) -> None:
    """A key for samples alone samples, and polls its results, which every key may; it lists and trains nothing."""
    http = await world.client(KeyRights(role=Role.ADMIN, scopes=frozenset({Scope.SAMPLE})))
    before = await world.counts()
    for call in CALLS:
        if call.needs and Scope.SAMPLE not in call.needs:
            assert (await send(http, call, world.own, 0)).status_code == 403, call
    assert await world.counts() == before
    body = filled(next(call for call in CALLS if call.path.endswith("/asample")).body, world.own)
    promised = (await http.post("/api/v1/asample", json=body)).raise_for_status().json()["request_id"]
    polled = await http.post("/api/v1/retrieve_future", json={"request_id": promised})
    assert (polled.status_code, polled.json()["type"]) == (408, "try_again")


async def test_a_training_post_that_is_not_allowed_uses_up_its_number(world: World) -> None:
    """A key that trains and may not save: the save fails, and the step behind it runs."""
    http = await world.client(KeyRights(role=Role.MEMBER, scopes=frozenset({Scope.TRAIN})))
    run = world.own["run"]
    body = {"model_id": run, "seq_id": 2, "path": "mine"}
    failed = (await http.post("/api/v1/save_weights", json=body)).raise_for_status().json()["request_id"]
    polled = (await http.post("/api/v1/retrieve_future", json={"request_id": failed})).json()
    assert (polled["category"], "checkpoints.write" in polled["error"]) == ("user", True)
    again = (await http.post("/api/v1/save_weights", json=body)).json()["request_id"]
    assert again == failed
    async with world.service.database.read() as session:
        row = await session.scalar(select(Operation).where(Operation.id == failed))
        me = (await http.get("/api/v1/auth/apikey/me")).json()["key_id"]
        assert (row.error_code, row.key_id) == ("forbidden", me)


_MODEL = {"session_id": "{session}", "model_seq_id": 5, "base_model": "test/tiny"}
_LOAD = {"session_id": "{session}", "model_seq_id": 5, "path": "tinker://{run}/weights/one"}
_SAMPLER = {"session_id": "{session}", "sampling_session_seq_id": 5, "base_model": "test/tiny"}
_PROMPT = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
_OTHER_BASE = {"base_models": frozenset({"another"})}


@pytest.mark.parametrize(
    ("bound", "path", "body"),
    [
        (_OTHER_BASE, "/create_model", _MODEL),
        ({"max_rank": 4}, "/create_model", {**_MODEL, "lora_config": {"rank": 5}}),
        ({"max_rank": 4}, "/load_weights", _LOAD),
        (_OTHER_BASE, "/load_weights", _LOAD),
        (_OTHER_BASE, "/create_sampling_session", _SAMPLER),
        (_OTHER_BASE, "/asample", {"sampling_session_id": "{sampler}", "seq_id": 9, **_PROMPT}),
        ({"networks": ("10.0.0.0/8", "2001:db8::/32")}, "/client/config", {}),
    ],
)
async def test_a_bound_is_named_by_its_refusal(world: World, bound: dict, path: str, body: dict) -> None:
    http = await world.client(replace(KeyRights(), **bound))
    before = await world.counts()
    answer = await http.post(f"/api/v1{path}", json=filled(body, world.own))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    named = {"base_models": "another", "max_rank": "rank 4", "networks": "10.0.0.0/8"}[next(iter(bound))]
    assert named in answer.json()["detail"]
    assert await world.counts() == before


_OF_A_BASE = ("/asample", "/stream_sample", "/completions", "/create_model", "/create_sampling_session", "/merges")
_OF_A_LANE = ("/load_weights", "/forward", "/forward_backward", "/optim_step", "/save_weights")


def _asked(*ends: str) -> list[Call]:
    """Requests of the matrix to the paths with these ends."""
    return [call for call in CALLS if call.method == "POST" and call.path.endswith(ends)]


async def test_a_key_for_other_base_models_has_nothing_computed_whatever_the_door(
    world: World, cats: Tenant, dogs: Tenant
) -> None:
    """Operations of a run of another base fail there; the next one of another key is taken, and a second tenant's is."""
    chat = BaseVocabulary(frozenset(), decode=lambda tokens: "x" * len(tokens), chat=lambda messages, tools: [7])
    world.service.services.vocabularies["test/tiny"] = chat
    http, before = await world.client(KeyRights(**_OTHER_BASE)), await world.counts()
    refused = _asked(*_OF_A_BASE)
    assert len(refused) == 7
    for call in refused:
        answer = await send(http, call, world.own, 0)
        told = answer.json().get("error", answer.json())
        assert (answer.status_code, told["code"]) == (403, "forbidden"), (call, answer.text)
        assert "only for the base models another" in told.get("message", told.get("detail")), call
    assert await world.counts() == before
    run = await cats.run(session=world.own["session"], model_seq_id=30)
    lane = [call for call in _asked(*_OF_A_LANE) if "model_id" in (call.body or {})]
    assert len(lane) == 5
    for seq_id, call in enumerate(lane, start=1):
        body = {**filled(call.body, {**world.own, "run": run}), "seq_id": seq_id}
        accepted = (await http.post(call.path, json=body)).raise_for_status().json()["request_id"]
        failed = (await http.post("/api/v1/retrieve_future", json={"request_id": accepted})).json()
        assert failed["category"] == "user", call
        assert "only for the base models another" in failed["error"], call
    step = {"model_id": run, "seq_id": len(lane) + 1}
    theirs = {"model_id": world.other_tenant["run"], "seq_id": 2}
    for tenant, body in ((cats, step), (dogs, theirs)):
        sent = (await tenant.http.post("/optim_step", json=body)).raise_for_status().json()
        polled = await tenant.http.post("/retrieve_future", json=sent)
        assert (polled.status_code, polled.json()["type"]) == (408, "try_again")


async def test_a_key_for_the_served_base_model_has_its_work_done(world: World, cats: Tenant) -> None:
    world.service.services.vocabularies["test/tiny"] = BaseVocabulary(frozenset(), lambda tokens: "x" * len(tokens))
    http = await world.client(KeyRights(base_models=frozenset({"test/tiny"})))
    for call in _asked("/asample", "/create_model", "/create_sampling_session", "/merges", *_OF_A_LANE):
        answer = await send(http, call, world.own, 0)
        assert answer.status_code == call.status, (call, answer.text)
    async with completing(replace(cats, key=http.headers["x-api-key"])) as completed:
        assert await finish_samples(world.service) == 2
    assert completed.result().choices[0].text == "x" * 8


async def test_a_key_with_a_bound_of_rank_imports_nothing_and_one_without_does(world: World) -> None:
    query = {"base_model": "test/tiny", "project_id": world.project}
    bound, free = await world.client(KeyRights(max_rank=4)), await world.client(KeyRights())
    before = await world.counts()
    refused = await bound.post("/api/weft/v1/imports", params=query, content=b"x" * 2000)
    assert (refused.status_code, "rank" in refused.json()["detail"]) == (403, True)
    assert await world.counts() == before
    assert (await free.post("/api/weft/v1/imports", params=query, content=b"x" * 2000)).status_code == 202


async def test_a_key_works_from_its_networks_and_until_its_last_second(world: World) -> None:
    ends = world.service.clock() + timedelta(hours=1)
    http = await world.client(KeyRights(networks=("127.0.0.0/8",), expires_at=ends))
    world.service.clock.move(minutes=59, seconds=59)
    assert (await http.post("/api/v1/client/config", json={})).status_code == 200
    world.service.clock.move(seconds=1)
    refused = await http.post("/api/v1/client/config", json={})
    assert (refused.status_code, "expired" in refused.json()["detail"]) == (401, True)
    assert (await world.tenant.http.post("/client/config", json={})).status_code == 200


async def test_a_viewer_acts_only_on_sessions_of_its_own(world: World) -> None:
    """Another key's is neither ended, nor kept alive, nor told to have failed."""
    http = await world.client(KeyRights(role=Role.VIEWER))
    before, theirs = await world.counts(), world.own["session"]
    for path, body in ((f"sessions/{theirs}/finish", {}), ("session_heartbeat", {"session_id": theirs})):
        refused = await http.post(f"/api/v1/{path}", json=body)
        assert (refused.status_code, "opened itself" in refused.text) == (403, True)
    assert (await http.post("/api/v1/telemetry", json=telemetry_of(theirs))).status_code == 200
    assert await world.counts() == before
    mine = (await http.post("/api/v1/create_session", json={})).json()["session_id"]
    assert (await http.post("/api/v1/session_heartbeat", json={"session_id": mine})).status_code == 200
    assert (await http.post("/api/v1/telemetry", json=telemetry_of(mine))).status_code == 200
    told = (await http.get("/api/weft/v1/client-exceptions")).json()
    assert [one["session_id"] for one in told["exceptions"]] == [mine]
    assert (await http.post(f"/api/v1/sessions/{mine}/finish", json={})).status_code == 204


async def test_keys_of_before_roles_go_on_as_members(world: World, service) -> None:
    async with service.database.read() as session:
        rows = await session.scalars(select(ApiKey.role).where(ApiKey.tenant_id == world.tenant.id))
        assert set(rows) == {"member"}


def test_every_role_but_the_services_own_has_all_that_those_before_it_have() -> None:
    sets = [SCOPES_OF_ROLES[role] for role in (Role.VIEWER, Role.MEMBER, Role.BILLING)]
    assert sets[0] < sets[1] < sets[2] < SCOPES_OF_ROLES[Role.ADMIN]
    assert SCOPES_OF_ROLES[Role.OPERATOR] == frozenset()
