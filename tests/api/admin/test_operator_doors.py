"""Doors of operators' pages, route by route: each needs an operator's session and its own origin, and no GET changes anything."""

import re
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import httpx
from fastapi.routing import APIRoute, iter_route_contexts

from api.admin.services import AdminServices
from api.dashboard.operators.app import create_operator_pages
from store.tables import Base
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant
from tests.api.dashboard.test_security_rules import EVERYWHERE, PAGE_POLICY
from tests.api.dashboard.visits import SAME, cookie_of, key_of, visitor
from tests.api.worlds import opened_world

OPEN = {"/ops", "/ops/login", "/ops/login/code", "/ops/policy-reports", "/ui/static/{name:path}"}
"""Routes that need no session. The first leads to a page that does."""


def _routes() -> Iterator[tuple[str, str]]:
    """Return method and path of each route."""
    app = create_operator_pages(create_autospec(AdminServices, instance=True))
    for context in iter_route_contexts(app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute), context.path
        for method in (route.methods or set()) - {"HEAD"}:
            yield method, context.path or ""


def _filled(path: str, **values: str) -> str:
    return re.sub(r"\{([a-z_]+)(:path)?\}", lambda found: values.get(found[1], "1"), path)


def _client(admin: Admin) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME)


async def _log_in(http: httpx.AsyncClient, admin: Admin) -> None:
    http.headers["cookie"] = cookie_of(await http.post("/ops/login", data={"key": admin.key.secret}))


async def _rows(admin: Admin) -> dict[str, list[Any]]:
    """Return every row of every table."""
    async with admin.service.database.read() as session:
        return {
            table.name: sorted(map(str, await session.execute(table.select()))) for table in Base.metadata.sorted_tables
        }


async def test_every_operators_page_needs_an_operators_session(admin: Admin, cats: Tenant) -> None:
    """Without one, with a tenant's, and with an operator's key in a header, each leads to the login and changes nothing."""
    tenants_key = await key_of(admin.service, cats)
    async with _client(admin) as http, visitor(admin.service, tenants_key.secret) as tenant:
        theirs = tenant.headers["cookie"]
        own_name = theirs.replace("__Host-weft=", "__Host-weft-ops=")
        ways = ({}, {"cookie": theirs}, {"cookie": own_name}, {"X-API-Key": admin.key.secret})
        before, asked = await _rows(admin), 0
        for method, path in _routes():
            if path in OPEN:
                continue
            for headers in ways:
                answer = await http.request(method, _filled(path), headers=headers)
                told = (answer.status_code, answer.headers.get("location"))
                assert told == (303, "/ops/login"), (method, path, headers)
                asked += 1
        assert asked > 100
        assert await _rows(admin) == before
        assert (await tenant.get("/ui")).status_code == 200


async def test_no_other_site_changes_anything_of_operators(admin: Admin, cats: Tenant) -> None:
    async with _client(admin) as http:
        await _log_in(http, admin)
        before, asked = await _rows(admin), 0
        for method, path in _routes():
            if method == "GET":
                continue
            for headers in (
                {"sec-fetch-site": "cross-site", "origin": admin.url},
                {"sec-fetch-site": "same-site", "origin": admin.url},
                {"sec-fetch-site": "none"},
                {"sec-fetch-site": "", "origin": "https://evil.example"},
            ):
                answer = await http.request(method, _filled(path, number=str(cats.id)), headers=headers)
                assert answer.status_code == 403, (path, headers)
                asked += 1
        del http.headers["sec-fetch-site"]
        assert (await http.post("/ops/logout")).status_code == 403
        assert asked > 40
        assert await _rows(admin) == before
        assert (await http.get("/ops/overview")).status_code == 200


async def test_no_get_of_operators_changes_anything_and_each_is_bound_by_the_policy(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    async with opened_world(admin.service, cats, dogs), _client(admin) as http:
        await _log_in(http, admin)
        before, opened = await _rows(admin), 0
        for method, path in _routes():
            if method != "GET":
                continue
            answer = await http.get(_filled(path, tenant_id=cats.id, number="1"))
            assert answer.status_code < 500, (path, answer.text)
            opened += answer.status_code == 200
            policy = {one.replace("/ui/policy", "/ops/policy") for one in PAGE_POLICY}
            assert set(answer.headers["content-security-policy"].split("; ")) in (policy, PAGE_POLICY), path
            assert answer.headers.items() >= EVERYWHERE.items(), path
            assert answer.headers["cache-control"] in ("no-store", "no-cache"), path
        assert opened > 10
        after = await _rows(admin)
        # A look into the audit log is itself in it.
        read = [row for row in after.pop("audit_entries") if row not in before["audit_entries"]]
        assert (len(read), "'audit_read'" in read[0]) == (1, True)
        assert {name: rows for name, rows in after.items() if rows != before[name]} == {}
