"""Requests beyond a rate of a tenant, a project or a key are refused where a client may be told to come again, and only there."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import limits.aio.storage.memory
import openai
import pytest
import pytest_asyncio
import tinker._base_client
from tinker._client import AsyncTinker

from api.route_bounds import declared_bounds
from contracts.paths import Segment
from store.settings import Settings
from tenants.keys import create_key, find_key, rotate_key, set_key_limits
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.rights import KeyRights, Role
from tests.api.conftest import Service, Tenant
from tests.api.dashboard.visits import key_of as key_of_page
from tests.api.dashboard.visits import routes, visitor
from tests.api.rights_matrix import CALLS
from tests.api.test_rates import limit, standing
from tests.api.test_rights import _routes, _template
from tests.api.worlds import World, opened_world, send

COUNTED_ON = {
    *("create_session", "create_model", "create_sampling_session", "join_sampling_session", "create_custom_loss"),
    *("forward", "forward_backward", "optim_step", "asample", "retrieve_future", "retrieve_futures"),
    *("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "weights_info", "get_info"),
    *(
        "session_heartbeat",
        "telemetry",
        "client_config",
        "dynamic_config",
        "get_server_capabilities",
        "describe_sampler",
    ),
    *("exchange_key", "get_own_key", "list_folder", "list_files", "get_revision", "get_repository", "get_file"),
    # What gives something back, or ends a danger.
    *("finish_session", "unload_model", "cancel_future", "cancel_job", "resume", "revoke", "revoke_own_key"),
    # Without a key: health, and links that were counted when they were asked for.
    *("healthz", "readyz", "download", "download_archive", "download_file", "download_traces"),
}
"""Names of the endpoints that are never refused for a rate of requests."""


@dataclass
class Minute:
    """Time by which requests are counted, in seconds: half a second of its minute is over. It stands still until it is moved."""

    now: float = 60_000_000.5

    def time(self) -> float:
        return self.now


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> Minute:
    found = Minute()
    monkeypatch.setattr(limits.aio.storage.memory, "time", found)
    return found


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"poll_hold": timedelta(milliseconds=10)})


@pytest_asyncio.fixture
async def world(service: Service, cats: Tenant, dogs: Tenant) -> Any:
    async with opened_world(service, cats, dogs) as made:
        yield made


async def runs(tenant: Tenant, **query: str) -> httpx.Response:
    """A list, which is a request that counts."""
    return await tenant.http.get("/training_runs", params=query)


async def key_of(tenant: Tenant, **rights: Any) -> tuple[int, Tenant]:
    """Another key of the tenant, by its number and as the tenant that sends it."""
    async with tenant.service.database.write() as transaction:
        asked = KeyRights(role=Role.ADMIN, **rights)
        made = await create_key(transaction, tenant=tenant.id, note="", clock=tenant.service.clock, rights=asked)
    http = httpx.AsyncClient(base_url=tenant.http.base_url, headers={"X-API-Key": made.secret}, timeout=30)
    return made.id, Tenant(tenant.service, tenant.id, made.secret, http)


async def test_a_minute_has_as_many_answers_as_the_rate_and_then_says_when_to_come_again(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    await limit(service, requests_per_minute=3)
    answers = [await runs(cats) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers["ratelimit"] for answer in answers] == [f'"requests";r={left};t=120' for left in (2, 1, 0)]
    minute.now += 15
    refused = await runs(cats)
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (429, "over_rate", True)
    assert "the rate of your tenant of 3 requests a minute is used up" in refused.json()["detail"]
    assert refused.headers["ratelimit-policy"] == '"requests";q=3;w=60'
    assert refused.headers["ratelimit"] == f'"requests";r=0;t={refused.headers["retry-after"]}'
    assert int(refused.headers["retry-after"]) == 45
    assert "ratelimit" not in (await runs(dogs)).headers
    minute.now += 44
    assert (await runs(cats)).status_code == 429
    minute.now += 2
    assert (await runs(cats)).status_code == 200
    # What the minute before had fades evenly: a third of it in twenty seconds.
    later = await runs(cats)
    assert (later.status_code, later.headers["retry-after"]) == (429, "19")
    minute.now += 20
    assert [(await runs(cats)).status_code for _ in range(2)] == [200, 429]
    assert [(await runs(dogs)).status_code for _ in range(9)] == [200] * 9


async def test_a_changed_rate_holds_from_the_next_request_on_with_what_was_counted(
    service: Service, cats: Tenant, minute: Minute
) -> None:
    await limit(service, requests_per_minute=5)
    assert [(await runs(cats)).status_code for _ in range(4)] == [200] * 4
    await limit(service, requests_per_minute=2)
    lowered = await runs(cats)
    assert lowered.status_code == 429
    assert int(lowered.headers["retry-after"]) <= 60
    await limit(service, requests_per_minute=6)
    assert [(await runs(cats)).status_code for _ in range(3)] == [200, 200, 429]
    await limit(service, requests_per_minute=None)
    assert "ratelimit" not in (await runs(cats)).headers


async def test_the_settings_rate_is_that_of_every_tenant_without_one_of_its_own(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute, monkeypatch: pytest.MonkeyPatch
) -> None:
    object.__setattr__(service.services, "limits", service.services.limits.with_own({"requests_per_minute": 1}))
    await limit(service, requests_per_minute=2)
    assert [(await runs(cats)).status_code for _ in range(3)] == [200, 200, 429]
    assert [(await runs(dogs)).status_code for _ in range(2)] == [200, 429]


async def test_every_route_counts_but_those_that_a_client_counts_on(service: Service) -> None:
    uncounted = {
        route.endpoint.__name__ for _, route in _routes(service) if not declared_bounds(route.endpoint).is_counted
    }
    assert uncounted <= COUNTED_ON
    assert COUNTED_ON - uncounted <= {
        "healthz",
        "readyz",
        "download",
        "download_archive",
        "download_file",
        "download_traces",
    }


async def test_a_used_up_rate_refuses_reads_lists_and_weft_s_own_routes_and_nothing_that_the_sdk_counts_on(
    service: Service, world: World, minute: Minute
) -> None:
    http = await world.client(KeyRights(role=Role.ADMIN))
    endpoints = {}
    for path, route in _routes(service):
        for method in route.methods:
            endpoints[method, _template(path)] = route.endpoint.__name__
    await limit(service, requests_per_minute=1)
    assert (await http.get("/api/v1/training_runs")).status_code == 200
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for call in CALLS:
        name = endpoints.get((call.method, _template(call.path)), call.path)
        answer = await send(http, call, world.own, 1)
        assert (answer.status_code == 429) == (name not in COUNTED_ON), (call, answer.text)
        seen[answer.status_code == 429].add(name)
        if answer.status_code != 429:
            assert answer.status_code == call.status, (call, answer.text)
    assert {"forward_backward", "asample", "retrieve_future", "session_heartbeat", "telemetry"} <= seen[False]
    assert len(seen[True]) > 40


async def test_a_keys_rate_is_its_own_and_goes_on_in_the_key_that_takes_its_place(
    service: Service, cats: Tenant, minute: Minute
) -> None:
    await limit(service, requests_per_minute=7)
    number, bounded = await key_of(cats, limits={"requests_per_minute": 2})
    assert [(await runs(bounded)).status_code for _ in range(4)] == [200, 200, 429, 429]
    refused = await runs(bounded)
    assert "the rate of this API key of 2 requests a minute is used up" in refused.json()["detail"]
    # What the key's rate refuses takes nothing of the tenant's.
    assert [(await runs(cats)).status_code for _ in range(6)] == [200] * 5 + [429]
    await limit(service, requests_per_minute=None)
    async with service.database.write() as transaction:
        row = await find_key(transaction, cats.id, number)
        made = await rotate_key(transaction, row, grace=timedelta(hours=1), clock=service.clock)
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": made.secret}) as http:
        assert (await http.get("/training_runs")).status_code == 429
    # Nor does a key get further by keys that it makes, or by one without a rate.
    minute.now += 120
    child = await bounded.http.post(f"{service.url}/api/weft/v1/keys", json={"role": "member"})
    async with httpx.AsyncClient(base_url=cats.http.base_url, headers={"X-API-Key": child.json()["secret"]}) as http:
        assert [(await http.get("/training_runs")).status_code for _ in range(2)] == [200, 429]
    async with service.database.write() as transaction:
        row = await find_key(transaction, cats.id, number)
        await set_key_limits(transaction, row, {"requests_per_minute": 9}, service.clock)
    raised = await bounded.http.put(
        f"{service.url}/api/weft/v1/keys/{number}/limits", json={"limits": {"requests_per_minute": 10}}
    )
    assert (raised.status_code, "requests_per_minute" in raised.text) == (403, True)
    await bounded.http.aclose()


async def test_a_projects_rate_counts_what_names_it_and_what_its_keys_send(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    async with service.database.write() as transaction:
        paper, other = [(await create_project(transaction, cats.id, name, service.clock)).id for name in ("a", "b")]
        theirs = (await create_project(transaction, dogs.id, "a", service.clock)).id
        await set_project_limits(transaction, cats.id, paper, {"requests_per_minute": 2}, service.clock)
        await set_project_limits(transaction, dogs.id, theirs, {"requests_per_minute": 1}, service.clock)
    _, inside = await key_of(cats, projects=frozenset({paper}))
    _, beside = await key_of(cats, projects=frozenset({other}))
    assert [(await runs(inside)).status_code, (await runs(cats, project_id=paper)).status_code] == [200, 200]
    refused = [await runs(inside), await runs(cats, project_id=paper), await runs(cats, project_id="a")]
    assert [answer.status_code for answer in refused] == [429, 429, 429]
    assert f"the rate of project {paper} of 2 requests a minute is used up" in refused[0].json()["detail"]
    assert [(await runs(one)).status_code for one in (beside, cats, cats)] == [200] * 3
    # Another tenant's project is none: its count is neither told nor touched.
    foreign = [
        await runs(cats, project_id=theirs),
        await runs(beside, project_id=paper),
        await runs(beside, project_id="a"),
        await runs(cats, project_id="a\0"),
    ]
    assert ["ratelimit" in answer.headers for answer in foreign] == [False] * 4
    assert (await runs(dogs, project_id=theirs)).status_code == 200
    told = (await standing(cats))["request_rates"]
    assert [(one["project"], one["used"], one["remaining"]) for one in told] == [(paper, 2, 0)]
    await asyncio.gather(inside.http.aclose(), beside.http.aclose())


async def test_a_key_of_projects_evades_their_rates_by_no_name_that_a_request_gives(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    """Routes that read no ``project_id`` answer whatever it is; a list of runs refuses a project that the key does not reach."""
    async with service.database.write() as transaction:
        tight, loose, free = [
            (await create_project(transaction, cats.id, name, service.clock)).id for name in ("tight", "loose", "free")
        ]
        for project, rate in ((tight, 2), (loose, 4)):
            await set_project_limits(transaction, cats.id, project, {"requests_per_minute": rate}, service.clock)
    (_, of_one), (_, of_two), (_, of_three) = [
        await key_of(cats, projects=frozenset(reached)) for reached in ({tight}, {tight, loose}, {tight, loose, free})
    ]

    async def answers(tenant: Tenant, *names: str) -> list[int]:
        asked = [{"project_id": name} if name else {} for name in names]
        url = f"{service.url}/api/weft/v1/projects"
        return [(await tenant.http.get(url, params=one)).status_code for one in asked]

    assert await answers(of_one, cats.id, "no-project", loose, "default", "a\0", "") == [200] * 2 + [429] * 4
    assert (await runs(of_one, project_id=free)).status_code == 429
    # A key of two projects has the rates of both, and another of its tenant, or a neighbour, is none the worse.
    assert await answers(of_two, tight, "tight") == [429] * 2
    assert await answers(of_two, free, cats.id, "", "loose", loose, "") == [200] * 4 + [429] * 2
    assert await answers(of_three, "", "no-project", free, loose) == [200] * 3 + [429]
    assert await answers(cats, "", cats.id, "no-project") == [200] * 3
    assert await answers(dogs, *[tight, ""] * 4) == [200] * 8
    await asyncio.gather(*(one.http.aclose() for one in (of_one, of_two, of_three)))


async def test_standing_tells_what_the_guard_counts(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    assert (await standing(cats))["request_rates"] == []
    await limit(service, requests_per_minute=8)
    number, bounded = await key_of(cats, limits={"requests_per_minute": 4})
    assert [(await runs(one)).status_code for one in (cats, bounded, bounded)] == [200] * 3
    found = await standing(cats)
    told = {
        (one["key"], one["project"]): (one["per_minute"], one["used"], one["remaining"])
        for one in found["request_rates"]
    }
    # The question itself is one of the tenant's.
    assert told == {(None, None): (8, 4, 4), (number, None): (4, 2, 2)}
    (own,) = [one for one in found["limits"] if one["name"] == "requests_per_minute"]
    assert (own["value"], own["used"], own["is_own"], own["is_reached"]) == (8, 4, True, False)
    assert (await standing(dogs))["request_rates"] == []
    await bounded.http.aclose()


async def test_the_overview_shows_what_standing_tells_and_pages_do_not_count(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    await limit(service, requests_per_minute=2)
    key = await key_of_page(service, cats, limits={"requests_per_minute": 1})
    assert [(await runs(cats)).status_code for _ in range(3)] == [200, 200, 429]
    async with visitor(service, key.secret) as page:
        shown = [(await page.get("/ui")).raise_for_status().text for _ in range(3)]
    for one in shown:
        assert 'data-limit="requests_per_minute" data-used="2" data-value="2"' in one
        assert f'Requests a minute of key {key.id}</span><span class="meter-value">0 of 1</span>' in one
    async with visitor(service, (await key_of_page(service, dogs)).secret) as page:
        assert "Requests a minute of" not in (await page.get("/ui")).raise_for_status().text


async def test_what_is_no_look_at_a_page_counts_as_the_apis_requests_do(
    service: Service, cats: Tenant, dogs: Tenant, minute: Minute
) -> None:
    """Samples of the playground, exports and links to downloads. What an open page asks for is a look at it."""
    run, theirs = await cats.run(), await dogs.run()
    data = [
        ("POST", "/ui/playground"),
        ("POST", "/ui/playground/stream"),
        ("POST", f"/ui/checkpoints/{run}/weights/one/download"),
        ("GET", f"/ui/runs/{run}/points.csv"),
        ("GET", f"/ui/runs/{run}/metrics.csv"),
        ("GET", "/ui/usage.csv"),
        ("GET", "/ui/usage/export"),
    ]
    exports = {path for path, _ in routes(service) if path.endswith((".csv", "/export", "/download"))}
    assert len(exports) == len(data) - 2, "each is in the list"
    looks = ["/ui/playground", f"/ui/runs/{run}", f"/ui/runs/{run}/curve", f"/ui/runs/{run}/curve/now", "/ui/runs/live"]
    other = (await key_of_page(service, dogs)).secret
    for method, path in data:
        key = await key_of_page(service, cats, limits={"requests_per_minute": 1})
        async with visitor(service, key.secret) as page, visitor(service, other) as beside:
            for look in [*looks, f"/ui/runs/{run}/news"]:
                assert (await page.get(look)).status_code == 200, look
            first = await page.request(method, path, data={"model": "x"} if method == "POST" else None)
            assert first.status_code != 429, (path, first.text)
            refused = await page.request(method, path, data={"model": "x"} if method == "POST" else None)
            assert refused.status_code == 429, path
            assert int(refused.headers["retry-after"]) > 0
            assert "the rate of this API key of 1 requests a minute is used up" in refused.text
            assert (await page.get(looks[0])).status_code == 200
            assert (await beside.get(f"/ui/runs/{theirs}/points.csv")).status_code == 200


async def test_openai_s_client_sleeps_as_told_and_goes_on(
    service: Service, cats: Tenant, minute: Minute, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one", segment=Segment.SAMPLER_WEIGHTS)
    await limit(service, requests_per_minute=2)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        minute.now += seconds

    monkeypatch.setattr(openai._base_client, "anyio", SimpleNamespace(sleep=sleep))
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=cats.key) as client:
        first = await client.models.with_raw_response.list()
        told = {name: first.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
        assert told == {"limit": "2", "remaining": "1", "reset": "120s"}
        await client.models.retrieve(run)
        assert slept == []
        await client.models.retrieve(run)
        assert slept == [60.0]
        with pytest.raises(openai.RateLimitError) as refused:
            await client.with_options(max_retries=0).models.list()
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.response.headers["retry-after"] == "30"
    assert refused.value.code == "over_rate"


async def test_the_sdk_s_reads_sleep_as_told_and_go_on(
    service: Service, cats: Tenant, minute: Minute, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await cats.run()
    await limit(service, requests_per_minute=1)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        minute.now += seconds

    monkeypatch.setattr(tinker._base_client, "anyio", SimpleNamespace(sleep=sleep))
    async with AsyncTinker(base_url=service.url, api_key=cats.key) as client:
        for _ in range(3):
            found = await client.get(f"/api/v1/training_runs/{run}", cast_to=object)
            assert found["training_run_id"] == run  # type: ignore[index]
    assert slept == [60.0, 60.0]
