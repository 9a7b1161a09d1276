"""Doors of the dashboard: sessions begin and end as their keys do, forged requests are refused, tenants stay apart."""

import asyncio
import re
from contextlib import AsyncExitStack
from datetime import timedelta
from html import escape

import httpx
import pytest
from sqlalchemy import func, select, update

from api.dashboard.events import MOST_STREAMS
from api.dashboard.login_guard import MOST_BEGUN, MOST_WRONG
from api.dashboard.web_session import PageRequire
from store.tables import ApiKey, AuditEntry, Base, Tenant, WebSession
from tenants.login_codes import make_code
from tenants.rights import Role
from tenants.web_sessions import MOST_SESSIONS
from tests.api.conftest import as_administrator
from tests.api.dashboard.visits import COOKIE, SAME, cookie_of, key_of, log_in, routes, visitor
from tests.api.test_rights import _dependencies
from tests.api.worlds import opened_world

OPEN = {"/ui/login", "/ui/login/code", "/ui/static/{name:path}", "/ui/policy-reports"}
"""Routes that need no session."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def _filled(path: str, ids: dict[str, str] | None = None) -> str:
    known = {
        "run_id": "run",
        "sampler_id": "sampler",
        "request_id": "request",
        "session_id": "session",
        "job_id": "request",
    }
    return re.sub(
        r"\{([a-z_]+)(:path)?\}", lambda found: (ids or {}).get(known.get(found[1], ""), "1"), path.removesuffix("{?}")
    )


async def test_every_page_declares_its_scopes_once(service) -> None:
    declared = {path: [type(one) for one in _dependencies(route.dependant)] for path, route in routes(service)}
    assert {path for path, kinds in declared.items() if kinds.count(PageRequire) != 1} == OPEN
    assert len(declared) > 12


async def test_every_answer_bounds_what_a_browser_does_with_it(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        pages = [
            await http.get(_filled(path))
            for path, route in routes(service)
            if "GET" in route.methods and "events" not in path
        ]
        api = await http.get("/api/v1/healthz")
    await as_administrator(cats)
    made = await cats.http.post(f"{service.url}/api/weft/v1/keys", json={"role": "viewer"})
    assert made.is_success
    assert "tml-" in made.text
    for answer in pages:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers.items() >= HEADERS.items()
        assert answer.headers["cache-control"] in ("no-store", "no-cache"), answer.url
    for answer in (api, made):
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'; sandbox"
        assert answer.headers.items() >= HEADERS.items()
        assert answer.headers["cache-control"] == "no-store"


async def test_no_other_site_changes_anything(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        unsafe = [_filled(path) for path, route in routes(service) if route.methods - {"GET", "HEAD"}]
        assert len(unsafe) >= 7
        for path in unsafe:
            for headers in (
                {"sec-fetch-site": "cross-site", "origin": service.url},
                {"sec-fetch-site": "same-site"},
                {"sec-fetch-site": "none"},
                {"sec-fetch-site": "", "origin": "https://evil.example"},
            ):
                assert (await http.post(path, headers=headers)).status_code == 403, path
        del http.headers["sec-fetch-site"]
        assert (await http.post("/ui/logout", headers={"origin": "https://evil.example"})).status_code == 403
        assert (await http.post("/ui/logout")).status_code == 403
        assert (await http.post("/ui/logout", headers={"origin": service.url})).status_code == 303


async def test_no_get_changes_anything(service, cats, dogs) -> None:
    async with opened_world(service, cats, dogs) as world:
        key = await key_of(service, cats)
        async with visitor(service, key.secret) as http:
            before = await world.counts()
            for path, route in routes(service):
                if "GET" in route.methods and "events" not in path:
                    answer = await http.get(_filled(path, world.own))
                    assert answer.status_code < 500, (path, answer.text)
            assert await world.counts() == before


async def test_another_tenants_ids_are_not_there(service, cats, dogs) -> None:
    async with opened_world(service, cats, dogs) as world:
        theirs, key = await key_of(service, dogs), await key_of(service, cats)
        async with visitor(service, theirs.secret) as other, visitor(service, key.secret) as http:
            # Whatever a form asks for is in it.
            asked, fields = (
                0,
                {"name": "1", "mode": "keep", "ttl_minutes": "5", "hours": "5", "url": "https://bell.example/"},
            )
            for path, route in routes(service):
                if "{" not in path or "static" in path:
                    continue
                # The first web session of the service is the other tenant's.
                number = "1" if "sessions" in path else str(theirs.id)
                for method in route.methods - {"HEAD"}:
                    place = _filled(
                        path.replace("{number}", number).replace("{segment}", "weights"), world.other_tenant
                    )
                    answer = await http.request(method, place, data=fields)
                    asked += 1
                    assert answer.status_code == 404, (path, answer.status_code)
                    assert "dogs" not in answer.text
            assert asked >= 5
            for path in {path for path, route in routes(service) if "{" not in path and "GET" in route.methods}:
                text = (await http.get(path)).text
                assert not [id for id in world.other_tenant.values() if id in text], path
            assert (await other.get("/ui/keys")).text.count("live") >= 2


async def test_the_api_reads_no_cookies_and_pages_read_no_keys(service, cats) -> None:
    async with visitor(service, cats.key) as http:
        assert (await http.get("/ui")).status_code == 200
        assert (await http.get("/api/weft/v1/usage/standing")).status_code == 401
    async with httpx.AsyncClient(base_url=service.url, timeout=40, headers={"X-API-Key": cats.key, **SAME}) as http:
        assert (await http.get("/ui")).status_code == 303


async def _age(service, key_id: int, **values: object) -> None:
    async with service.database.write() as transaction:
        await transaction.execute(update(ApiKey).where(ApiKey.id == key_id).values(**values))


@pytest.mark.parametrize("change", ["revoked", "expired", "network", "blocked", "idle", "old"])
async def test_a_session_ends_with_its_key_its_tenant_or_its_time(service, cats, dogs, change) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http, visitor(service, dogs.key) as other:
        assert (await http.get("/ui")).status_code == 200
        expected = 303
        match change:
            case "revoked":
                await _age(service, key.id, revoked_at=service.clock())
            case "expired":
                await _age(service, key.id, expires_at=service.clock())
            case "network":
                await _age(service, key.id, networks=["10.0.0.0/8"])
                expected = 403
            case "blocked":
                async with service.database.write() as transaction:
                    tenant = update(Tenant).where(Tenant.id == cats.id)
                    await transaction.execute(tenant.values(suspended_at=service.clock(), suspend_mode="blocked"))
                expected = 403
            case "idle":
                for _ in range(5):
                    service.clock.move(hours=2)
                    assert (await other.get("/ui")).status_code == 200
            case "old":
                for _ in range(4):
                    service.clock.move(hours=6)
                    if _ < 3:
                        assert (await http.get("/ui")).status_code == (await other.get("/ui")).status_code == 200
        assert (await http.get("/ui")).status_code == expected
        if change != "old":
            assert (await other.get("/ui")).status_code == 200


async def test_a_stream_ends_with_its_key_and_the_oldest_of_five_ends(service, cats, dogs) -> None:
    key, run = await key_of(service, cats), await cats.run()
    place = f"/ui/runs/{run}/events"
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        http = await stack.enter_async_context(visitor(service, key.secret))
        lines = []
        for _ in range(MOST_STREAMS + 1):
            answer = await stack.enter_async_context(http.stream("GET", place))
            assert answer.status_code == 200
            lines.append(answer.aiter_lines())
            assert await anext(lines[-1]) == "retry: 1000"
        displaced = [line async for line in lines[0]]
        assert "retry: 60000" in displaced
        await _age(service, key.id, revoked_at=service.clock())
        await service.services.ended_keys.look()
        for left in lines[1:]:
            assert "retry: 60000" not in [line async for line in left]


async def test_many_wrong_keys_have_to_wait_and_a_minute_later_a_right_one_is_taken(service, cats) -> None:
    async with visitor(service) as http:
        wrong = cats.key[:-1] + ("0" if cats.key[-1] != "0" else "1")
        for _ in range(MOST_WRONG):
            assert (await log_in(http, wrong)).status_code == 401
        refused = await log_in(http, cats.key)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        service.clock.move(seconds=61)
        assert (await log_in(http, cats.key)).status_code == 303


async def test_strangers_keep_no_right_key_out(service, cats) -> None:
    wrong = cats.key[:-1] + ("0" if cats.key[-1] != "0" else "1")
    elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(base_url=service.url, timeout=40, headers=SAME, transport=elsewhere) as stranger:
        for _ in range(MOST_WRONG):
            assert (await log_in(stranger, wrong)).status_code == 401
    async with visitor(service) as http:
        assert (await log_in(http, wrong)).status_code == 429, "this key was tried too often"
        assert (await log_in(http, cats.key)).status_code == 303


async def test_a_key_begins_a_bounded_number_of_sessions_a_minute(service, cats, dogs) -> None:
    async with visitor(service) as http:
        for _ in range(MOST_BEGUN):
            assert (await log_in(http, cats.key)).status_code == 303
        assert (await log_in(http, cats.key)).status_code == 429
        assert (await log_in(http, dogs.key)).status_code == 303


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "https://elsewhere"])
async def test_an_origin_that_is_none_of_ours_is_refused(service, cats, origin: str) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=40, headers={"origin": origin}) as http:
        assert (await http.post("/ui/login", data={"key": cats.key})).status_code == 403


@pytest.mark.parametrize("days", ["0", "5000", "90d", "-1", "000001999999999999", "9" * 40])
async def test_a_key_with_a_wrong_end_is_not_made(service, cats, days: str) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http, service.database.read() as session:
        before = await session.scalar(select(func.count()).select_from(ApiKey))
        answer = await http.post("/ui/keys", data={"note": "x", "role": "viewer", "days": days})
        assert "days" in answer.text
        assert answer.status_code < 500
    async with service.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(ApiKey)) == before


async def test_no_whole_key_fits_into_an_address(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        assert (await http.get("/ui/audit", params={"key": key.prefix})).status_code == 200
        assert 400 <= (await http.get("/ui/audit", params={"key": key.secret})).status_code < 500


async def test_no_door_takes_a_secret_from_an_address(service, cats, dogs) -> None:
    """Keys and web sessions count in headers and cookies alone: an address is kept in histories and logs."""
    run = await cats.run()
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        cookie = http.headers["cookie"].partition("=")[2]
    paths = ("/api/v1/sessions", "/api/weft/v1/usage/standing", "/v1/models", f"/api/weft/v1/runs/{run}/points")
    names = ("token", "key", "api_key", "access_token", "X-API-Key", "session", COOKIE)
    async with httpx.AsyncClient(base_url=service.url, timeout=40, headers=SAME) as stranger:
        for secret in (key.secret, cookie):
            given = dict.fromkeys(names, secret)
            for path in paths:
                assert (await stranger.get(path, params=given)).status_code == 401, path
            for path in ("/ui", "/ui/runs", f"/ui/runs/{run}", f"/ui/runs/{run}/events", f"/ui/runs/{run}/points.csv"):
                answer = await stranger.get(path, params=given)
                assert answer.status_code in (303, 401), path
                assert secret not in answer.headers.get("location", "") + answer.text, path
        assert (await stranger.get(paths[0], headers={"X-API-Key": dogs.key})).status_code == 200


async def test_a_code_logs_in_once_and_soon(service, cats) -> None:
    key = await key_of(service, cats)

    async def code() -> str:
        async with service.database.write() as transaction:
            return await make_code(transaction, key.id, now=service.clock())

    async with visitor(service) as http:
        first, late = await code(), await code()
        answer = await http.post("/ui/login/code", data={"code": first})
        assert answer.status_code == 303
        assert (await http.get("/ui", headers={"cookie": cookie_of(answer)})).status_code == 200
        assert (await http.post("/ui/login/code", data={"code": first})).status_code == 401
        service.clock.move(seconds=61)
        assert (await http.post("/ui/login/code", data={"code": late})).status_code == 401


async def test_plain_http_from_elsewhere_takes_no_key(service, cats) -> None:
    async with visitor(service) as http:
        http.headers["host"] = "weft.example"
        assert "needs https" in (await http.get("/ui/login")).text
        answer = await log_in(http, cats.key)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


async def test_a_login_leads_to_own_pages_only_and_always_begins_a_new_session(service, cats) -> None:
    async with visitor(service) as http:
        places, cookies = [], set()
        own = ("/ui/runs", "/ui/runs/compare?run=a%3A1&run=b")
        evil = ("https://evil.example/ui", "//evil.example", "/ui//\\evil", "/ui?x=\r\ny", "/other?/ui")
        for target in (*own, *evil):
            http.headers["cookie"] = f"{COOKIE}=fixed"
            answer = await log_in(http, cats.key, next=target)
            places.append(answer.headers["location"])
            cookies.add(cookie_of(answer))
        assert places == [*own, *["/ui"] * len(evil)]
        assert len(cookies) == len(places)
        flags = answer.headers["set-cookie"].lower()
        assert flags.startswith("__host-weft=")
        assert {one.strip() for one in flags.split(";")[1:]} == {
            *("httponly", "path=/", "samesite=lax", "secure"),
            "max-age=86400",
        }


async def test_a_page_that_needs_a_login_comes_back_whole_after_it(service, cats) -> None:
    async with visitor(service) as http:
        shown = "/ui/runs/compare?run=a%3A1&run=b"
        parted = {"hx-request": "true", "hx-current-url": f"https://weft.example{shown}"}
        moved = (await http.get(shown)).headers["location"]
        assert moved == (await http.get("/ui/queue/table", headers=parted)).headers["hx-redirect"]
        assert f'value="{escape(shown)}"' in (await http.get(moved)).text
        long = await http.get((await http.get(f"/ui/runs?text={'x' * 3000}")).headers["location"])
        assert (long.status_code, 'value="/ui/runs"' in long.text) == (200, True)


async def test_a_key_has_so_many_sessions_and_no_more(service, cats, dogs) -> None:
    async with visitor(service, dogs.key) as other, visitor(service, cats.key) as first, visitor(service) as browser:
        for _ in range(MOST_SESSIONS):
            await log_in(browser, cats.key)
        assert (await first.get("/ui")).status_code == 303
        assert (await other.get("/ui")).status_code == 200
    async with service.database.read() as session:
        counted = select(func.count()).where(WebSession.tenant_id == cats.id)
        assert await session.scalar(counted) == MOST_SESSIONS


async def test_a_viewer_does_by_hand_no_more_than_it_is_shown(service, cats) -> None:
    key = await key_of(service, cats, Role.VIEWER)
    async with visitor(service, key.secret) as http:
        for path in ("/ui/keys", "/ui/projects"):
            answer = await http.post(path, data={"name": "x", "note": "x", "role": "viewer"})
            assert (answer.status_code, "this needs the scope" in answer.text) == (403, True)
        admin = await key_of(service, cats)
        assert (await http.post(f"/ui/keys/{admin.id}/revoke")).status_code == 403


async def test_what_is_done_in_the_dashboard_is_in_the_audit_log_by_its_door(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        assert (await http.post("/ui/projects", data={"name": "whiskers"})).status_code == 303
        assert (await http.post("/ui/logout")).status_code == 303
    async with service.database.read() as session:
        entries = list(await session.scalars(select(AuditEntry).where(AuditEntry.tenant_id == cats.id)))
    told = [(one.action, one.door, one.actor) for one in sorted(entries, key=lambda one: one.id)]
    assert told == [(action, "ui", key.prefix) for action in ("login_begin", "project_create", "login_end")]


async def test_neither_operators_pages_nor_their_api_are_on_the_tenants_port(service, cats) -> None:
    async with visitor(service, cats.key) as http:
        for path in (
            "/ops",
            "/ops/login",
            "/admin",
            "/admin/v1/tenants",
            "/docs",
            "/openapi.json",
            "/ui/docs",
            "/ui/openapi.json",
        ):
            assert (await http.get(path)).status_code == 404, path


async def test_ended_sessions_and_codes_are_deleted(service, cats) -> None:
    from tenants.login_codes import delete_expired_codes
    from tenants.web_sessions import delete_ended_sessions

    key = await key_of(service, cats)
    async with visitor(service, key.secret), visitor(service, cats.key) as other:
        async with service.database.write() as transaction:
            await make_code(transaction, key.id, now=service.clock())
        await _age(service, key.id, revoked_at=service.clock())
        service.clock.move(minutes=2)
        async with service.database.write() as transaction:
            idle = timedelta(hours=8)
            assert await delete_ended_sessions(transaction, now=service.clock(), idle=idle, most=10) == 1
            assert await delete_expired_codes(transaction, now=service.clock(), most=10) == 1
        assert (await other.get("/ui")).status_code == 200
    assert {"web_sessions", "login_codes"} <= set(Base.metadata.tables)
