"""The admin API is on its own listener and takes operators' keys only; tenants' routes and keys have nothing to do with it."""

import re
from collections.abc import Iterator
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import select

from store.tables import OperatorKey
from tenants.key_text import key_text, new_prefix
from tenants.operator_keys import create_operator_key, revoke_operator_key
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant


async def routes(admin: Admin) -> Iterator[tuple[str, str]]:
    """Every documented admin route: method, and a path with made-up ids."""
    document = (await admin.http.get("/openapi.json")).raise_for_status().json()
    assert len(document["paths"]) > 30
    found = [(method, re.sub(r"\{[^}]*\}", "1", path)) for path, one in document["paths"].items() for method in one]
    return iter(found)


async def test_every_admin_path_is_404_on_the_tenants_port(admin: Admin, cats: Tenant) -> None:
    for method, path in await routes(admin):
        for key in (cats.key, admin.key.secret):
            answer = await cats.http.request(method, f"{admin.service.url}{path}", headers={"X-API-Key": key})
            assert (answer.status_code, answer.json()["code"]) == (404, "not_implemented"), (method, path)


async def test_every_admin_route_refuses_all_but_operators_keys(admin: Admin, cats: Tenant) -> None:
    unknown = key_text(new_prefix(), bytes(32))
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        for method, path in await routes(admin):
            for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": cats.key}, {"Authorization": f"Bearer {unknown}"}):
                answer = await http.request(method, path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), (method, path)


async def test_an_operators_key_is_no_tenants(admin: Admin, cats: Tenant) -> None:
    refused = await cats.http.get("/sessions", headers={"X-API-Key": admin.key.secret})
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert (await cats.http.get("/sessions")).status_code == 200


async def test_no_admin_listener_runs_by_default(admin: Admin) -> None:
    assert admin.service.services.runtime.settings.admin_port is None


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_an_ended_operators_key_is_refused_from_the_next_request_on(admin: Admin, end: str) -> None:
    service = admin.service
    async with service.database.write() as transaction:
        ends = service.clock() + timedelta(seconds=60)
        key = await create_operator_key(transaction, note="", expires_at=ends, clock=service.clock)
    headers = {"X-API-Key": key.secret}
    assert (await admin.http.get("/tenants", headers=headers)).status_code == 200
    if end == "revoked":
        async with service.database.write() as transaction:
            assert await revoke_operator_key(transaction, key=key.secret, clock=service.clock) == key.prefix
    else:
        service.clock.move(seconds=60)
    assert (await admin.http.get("/tenants", headers=headers)).status_code == 401
    assert (await admin.http.get("/tenants")).status_code == 200


async def test_a_secret_with_a_known_first_part_is_refused(admin: Admin) -> None:
    guessed = key_text(admin.key.prefix, bytes(32))
    assert (await admin.http.get("/tenants", headers={"X-API-Key": guessed})).status_code == 401


async def test_a_use_is_noted_to_the_minute_and_the_secret_is_stored_nowhere(admin: Admin) -> None:
    for _ in range(3):
        assert (await admin.http.get("/tenants")).status_code == 200
    async with admin.service.database.read() as session:
        (row,) = await session.scalars(select(OperatorKey))
    assert row.last_used_at == admin.service.clock().replace(second=0, microsecond=0)
    for path in admin.data.rglob("*"):
        assert not path.is_file() or admin.key.secret[17:].encode() not in path.read_bytes(), path
