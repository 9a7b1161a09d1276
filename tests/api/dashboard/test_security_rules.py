"""Security rules of the dashboard: secrets, cookies, https, policies, kinds of forms, guesses of codes, entries of changes."""

import base64
import json
import re

import httpx
import pytest
from sqlalchemy import select

from api.dashboard.login_guard import MOST_WRONG
from store.settings import Settings
from store.tables import AuditEntry, Base, WebSession
from tenants.login_codes import make_code
from tenants.looks import begin_look
from tenants.rights import Role
from tests.api.admin.conftest import admin  # noqa: F401 - a fixture
from tests.api.dashboard.visits import COOKIE, SAME, cookie_of, key_of, log_in, routes, visitor
from tests.api.test_public_address import SECURE

PAGE_POLICY = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "font-src 'self'",
    "form-action 'self'",
    "base-uri 'none'",
    "frame-ancestors 'none'",
    "object-src 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types default",
    "report-uri /ui/policy-reports",
}
API_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
EVERYWHERE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "x-frame-options": "DENY",
}


async def _whole_database(service) -> str:
    """Return every value of every table as text."""
    async with service.database.read() as session:
        found = [str(row) for table in Base.metadata.sorted_tables for row in await session.execute(table.select())]
    return "\n".join(found)


async def test_a_session_has_a_secret_of_its_own_and_neither_it_nor_the_key_is_stored(service, cats) -> None:
    key = await key_of(service, cats)
    async with visitor(service) as http:
        answer = await log_in(http, key.secret)
        token = cookie_of(answer).partition("=")[2]
        page = await http.get("/ui/sessions", headers={"cookie": cookie_of(answer)})
    assert len(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))) >= 32
    assert len(answer.headers["set-cookie"]) < 4096
    stored = await _whole_database(service)
    for secret in (token, key.secret, key.secret.split("-", 2)[2]):
        assert secret not in stored + answer.text + page.text
    async with service.database.read() as session:
        (row,) = await session.scalars(select(WebSession))
    assert (row.key_id, row.tenant_id, row.address) == (key.id, cats.id, "127.0.0.1")
    assert row.agent.startswith("python-httpx")


async def test_pages_and_the_api_are_each_bound_by_their_whole_policy(service, cats) -> None:
    run = await cats.run()
    await cats.checkpoint(run, "one")
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        pages = [await http.get(path) for path in ("/ui", "/ui/login", "/ui/nowhere", "/ui/static/weft.js", "/ui/keys")]
        refused = await http.post("/ui/logout", headers={"sec-fetch-site": "cross-site"})
        headers = {"x-api-key": cats.key}
        archive = f"/api/v1/training_runs/{run}/checkpoints/weights/one/archive"
        link = (await http.get(archive, headers=headers)).headers["location"]
        download = await http.get(link)
        file = await http.get(f"{link.removesuffix('archive.tar')}files/adapter_model.safetensors")
        told = [await http.get(path, headers=headers) for path in ("/api/v1/sessions", "/api/nowhere", "/v1/models")]
        told += [await http.get("/api/v1/sessions"), download, file, await http.get("/nobody/nothing/resolve/main/x")]
    for answer in (*pages, refused):
        assert set(answer.headers["content-security-policy"].split("; ")) == PAGE_POLICY, answer.url
    for answer in told:
        assert answer.headers["content-security-policy"] == API_POLICY, answer.url
    for answer in (*pages, refused, *told):
        assert answer.headers.items() >= EVERYWHERE.items(), answer.url
        assert "strict-transport-security" not in answer.headers
    assert (download.status_code, file.status_code) == (200, 200)
    assert download.headers["content-disposition"] == 'attachment; filename="checkpoint.tar"'
    assert file.headers["content-disposition"] == "attachment"


async def test_a_logout_has_the_browser_forget_its_pages(service, cats, admin) -> None:  # noqa: F811
    async with visitor(service, cats.key) as http:
        answer = await http.post("/ui/logout")
        assert answer.headers["clear-site-data"] == '"cache", "storage"'
        assert f"{COOKIE}=" in answer.headers["set-cookie"]
        assert "max-age=0" in answer.headers["set-cookie"].lower()
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret})
        http.headers["cookie"] = cookie_of(begun)
        assert (await http.post("/ops/logout")).headers["clear-site-data"] == '"cache", "storage"'


async def test_no_other_kind_of_body_is_taken_for_a_form(service, cats) -> None:
    """Kinds that a form of another site can send are refused, and those that a script sends."""
    key = await key_of(service, cats)
    async with visitor(service, key.secret) as http:
        before = await _whole_database(service)
        for content, kind in (
            (b"name=x", "text/plain"),
            (b'{"name": "x"}', "application/json"),
            (
                b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nx\r\n--b--\r\n',
                "multipart/form-data; boundary=b",
            ),
        ):
            for path in ("/ui/projects", "/ui/keys", "/ui/webhooks"):
                answer = await http.post(path, content=content, headers={"content-type": kind})
                assert (answer.status_code, "a page takes a form" in answer.text) == (400, True), (path, kind)
        assert await _whole_database(service) == before


async def test_guesses_of_a_code_have_to_wait_and_hold_up_nobody_else(service, cats) -> None:
    key = await key_of(service, cats)
    elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=40, headers=SAME, transport=elsewhere) as stranger,
        visitor(service) as http,
    ):
        for guess in range(MOST_WRONG):
            assert (await stranger.post("/ui/login/code", data={"code": f"guess {guess}"})).status_code == 401
        async with service.database.write() as transaction:
            code = await make_code(transaction, key.id, now=service.clock())
        assert (await stranger.post("/ui/login/code", data={"code": code})).status_code == 429
        assert (await http.post("/ui/login/code", data={"code": code})).status_code == 303


async def test_who_manages_no_keys_sees_and_ends_the_sessions_of_the_own_key_only(service, cats, dogs) -> None:
    member, other = await key_of(service, cats, Role.MEMBER), await key_of(service, cats, Role.MEMBER)
    manager, stranger = await key_of(service, cats), await key_of(service, dogs)
    async with visitor(service, other.secret) as second, visitor(service, member.secret) as http:
        async with service.database.read() as session:
            ids = {row.key_id: row.id for row in await session.scalars(select(WebSession))}
        page = (await http.get("/ui/sessions")).text
        assert (member.prefix in page, other.prefix in page) == (True, False)
        assert (await http.post(f"/ui/sessions/{ids[other.id]}/end")).status_code == 404
        assert (await second.get("/ui")).status_code == 200
        async with visitor(service, stranger.secret) as foreign, visitor(service, manager.secret) as both:
            assert (await foreign.post(f"/ui/sessions/{ids[other.id]}/end")).status_code == 404
            assert other.prefix in (await both.get("/ui/sessions")).text
            assert (await both.post(f"/ui/sessions/{ids[other.id]}/end")).status_code == 303
        assert (await second.get("/ui")).status_code == 303
        assert (await http.get("/ui")).status_code == 200


async def test_each_change_of_a_page_makes_its_entry_with_the_change(service, cats) -> None:
    """Forms that change a tenant's things, each with its entry; a refused one has none."""
    key = await key_of(service, cats)
    run = await cats.run()
    await cats.checkpoint(run, "one")
    place = f"/ui/checkpoints/{run}/weights/one"
    forms = [
        ("/ui/projects", {"name": "whiskers"}, ["project_create"]),
        ("/ui/keys", {"note": "", "role": "viewer"}, ["key_create"]),
        ("/ui/webhooks", {"name": "bell", "url": "https://bell.example/"}, ["webhook_set", "webhook_read"]),
        ("/ui/webhooks/bell/secret", {}, ["webhook_rotate"]),
        ("/ui/webhooks/bell/test", {}, ["webhook_test"]),
        ("/ui/webhooks/bell/disable", {}, ["webhook_set"]),
        ("/ui/webhooks/bell/delete", {}, ["webhook_delete"]),
        (f"/ui/adapters/{run}/pause", {"mode": "keep"}, ["gate_pause"]),
        (f"/ui/adapters/{run}/resume", {"generation": "1"}, ["gate_resume"]),
        (f"{place}/ttl", {"hours": "5"}, ["checkpoint_set"]),
        (f"{place}/publish", {}, ["checkpoint_publish"]),
        (f"{place}/unpublish", {}, ["checkpoint_unpublish"]),
        (f"{place}/download", {}, ["checkpoint_read"]),
        (f"{place}/delete", {"name": "another"}, []),
        (f"{place}/delete", {"name": "one"}, ["checkpoint_delete"]),
    ]
    async with visitor(service, key.secret) as http:
        for path, fields, actions in forms:
            before = len(await _entries(service, cats))
            answer = await http.post(path, data=fields)
            assert answer.status_code in ((200, 303) if actions else (400,)), (path, answer.text)
            assert (await _entries(service, cats))[before:] == [(one, "ui", key.prefix) for one in actions], path
        stored = json.dumps([str(one) for one in await _entries(service, cats)])
        assert key.secret not in stored


async def test_a_look_of_an_operator_sees_the_tenants_pages_and_changes_nothing_by_any_route(
    service, cats, dogs
) -> None:
    """Every route that changes something is refused, but for the end of the look itself; the tenant's own goes on."""
    run, key = await cats.run(), await key_of(service, cats)
    async with service.database.write() as transaction:
        code = await begin_look(transaction, cats.id, operator="grace", reason="ticket 7", clock=service.clock)
    open_ways = {"/ui/login", "/ui/login/code", "/ui/logout", "/ui/policy-reports"}
    unsafe = {path for path, route in routes(service) if route.methods - {"GET", "HEAD"}} - open_ways
    async with visitor(service, key.secret) as own, visitor(service) as http:
        begun = await http.post("/ui/login/code", data={"code": code})
        http.headers["cookie"] = cookie_of(begun)
        assert (await http.get(f"/ui/runs/{run}")).status_code == 200
        before = await _whole_database(service)
        for path in sorted(unsafe):
            place = path.replace("{run_id}", run).replace("{number}", str(key.id))
            answer = await http.post(re.sub(r"\{[a-z_]+\}", "one", place), data={"name": "x", "mode": "keep"})
            told = (answer.status_code, "nothing can be changed from here" in answer.text)
            assert told == (403, True), path
        assert await _whole_database(service) == before
        assert len(unsafe) > 20
        assert (await own.post("/ui/projects", data={"name": "whiskers"})).status_code == 303
        assert (await http.post("/ui/logout")).status_code == 303
        assert (await http.get("/ui")).status_code == 303


async def _entries(service, tenant) -> list[tuple[str, str, str]]:
    async with service.database.read() as session:
        found = await session.execute(
            select(AuditEntry.action, AuditEntry.door, AuditEntry.actor)
            .where(AuditEntry.tenant_id == tenant.id)
            .order_by(AuditEntry.id)
        )
        return [tuple(one) for one in found]


class TestBehindAProxy:
    """A proxy on loopback that ends TLS; another sender is not believed."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        given = {"trusted_proxies": ("127.0.0.1/32",), "trusted_hosts": ("weft.example",)}
        return Settings.model_validate({**settings.model_dump(), **given})

    async def test_https_is_kept_and_only_a_trusted_proxy_may_tell_of_it(self, service, cats) -> None:
        headers = {**SECURE, "host": "weft.example", **SAME}
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with (
            httpx.AsyncClient(base_url=service.url, timeout=40, headers=headers) as http,
            httpx.AsyncClient(base_url=service.url, timeout=40, headers=headers, transport=elsewhere) as liar,
        ):
            answer = await log_in(http, cats.key)
            assert answer.status_code == 303
            assert answer.headers["strict-transport-security"] == "max-age=31536000"
            assert "; secure" in answer.headers["set-cookie"].lower()
            refused = await log_in(liar, cats.key)
            assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
            assert "strict-transport-security" not in refused.headers
            assert (await liar.get("/ui", headers={"cookie": cookie_of(answer)})).status_code == 403

    async def test_a_proxy_without_tls_that_sends_its_own_name_takes_no_key_of_another_machine(
        self, service, cats
    ) -> None:
        headers = {**SAME, "x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "http"}
        async with httpx.AsyncClient(base_url=service.url, timeout=40, headers=headers) as http:
            refused = await log_in(http, cats.key)
            assert (refused.status_code, "set-cookie" in refused.headers) == (403, False)
            del http.headers["x-forwarded-for"]
            assert (await log_in(http, cats.key)).status_code == 303


class TestOverPlainHttp:
    """``WEFT_INSECURE_UI``: whoever sets it is told on every page what it means."""

    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        return settings.model_copy(update={"insecure_ui": True})

    async def test_a_cookie_of_another_name_is_given_and_every_page_says_so(self, service, cats) -> None:
        async with visitor(service) as http:
            http.headers["host"] = "weft.example"
            answer = await log_in(http, cats.key)
            flags = answer.headers["set-cookie"].lower()
            assert answer.status_code == 303
            assert ("__host-" in flags, "; secure" in flags) == (False, False)
            assert all(flag in flags for flag in ("httponly", "samesite=lax", "path=/"))
            http.headers["cookie"] = cookie_of(answer)
            for path in ("/ui", "/ui/login", "/ui/keys"):
                assert "may be served over plain http" in (await http.get(path)).text, path
