"""The operators' client against a running admin API: tenants changed once, lists over pages, typed errors, raw answers."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE

import pytest
from weft_client.admin_async import AsyncWeftAdmin
from weft_client.admin_sync import WeftAdmin
from weft_client.asynchronous import AsyncWeft
from weft_client.errors import BadRequest, EditConflict, NotAuthenticated, NotThere

from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant
from tests.conftest import ROOT


async def test_an_operator_makes_bounds_and_suspends_a_tenant(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    async with AsyncWeftAdmin(admin.url, admin.key.secret, retries=0) as weft:
        made = await weft.tenants.create("birds", idempotency_key="one")
        assert await weft.tenants.create("birds", idempotency_key="one") == made
        with pytest.raises(BadRequest):
            await weft.tenants.create("fish", idempotency_key="one")
        changed = await weft.tenants.change(made.tenant.id, limits={"sessions": 3}, service_class="batch")
        assert (changed.limits, changed.service_class) == ({"sessions": 3}, "batch")
        assert (await weft.tenants.suspend(made.tenant.id, reason="unpaid")).suspension is not None
        assert (await weft.tenants.resume(made.tenant.id)).suspension is None
        assert (await weft.tenants.get(dogs.id)).limits == {}
        assert [one.name async for one in weft.tenants.list(name="birds")] == ["birds"]
        with pytest.raises(NotThere):
            await weft.tenants.get("nobody")


async def test_a_change_of_what_somebody_else_has_changed_is_refused(admin: Admin, cats: Tenant, dogs: Tenant) -> None:
    async with AsyncWeftAdmin(admin.url, admin.key.secret, retries=0) as weft:
        seen = await weft.with_raw_response(weft.tenants.get, cats.id)
        assert (seen.status, seen.parsed.id) == (200, cats.id)
        await weft.tenants.change(cats.id, share=2.0)
        with pytest.raises(EditConflict):
            await weft.tenants.change(cats.id, share=3.0, if_match=seen.headers["ETag"])
        assert (await weft.tenants.get(cats.id)).share == 2.0


async def test_a_list_is_read_over_its_pages(admin: Admin, cats: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncWeftAdmin(admin.url, admin.key.secret, retries=0) as weft:
        for number in range(201):
            await weft.projects.create(cats.id, f"project-{number}")
        keys = [await weft.keys.create(cats.id, note=str(number)) for number in range(3)]
        listed = [one.key_id async for one in weft.keys.list(tenant=cats.id)]
        assert set(listed) >= {one.key_id for one in keys}
        assert len([one async for one in weft.audit.entries(action=["project_create"])]) == 201
    monkeypatch.setenv("WEFT_ADMIN_URL", admin.url)
    monkeypatch.setenv("WEFT_ADMIN_KEY", admin.key.secret)
    async with AsyncWeft(cats.service.url, cats.key) as tenants:
        assert (await tenants.admin.tenants.get(cats.id)).id == cats.id


async def test_the_half_without_asyncio_does_the_same(admin: Admin, cats: Tenant) -> None:
    def look() -> str:
        with WeftAdmin(admin.url, admin.key.secret, retries=0) as weft:
            raw = weft.with_raw_response(weft.tenants.change, cats.id, share=4.0)
            assert raw.parsed.share == 4.0
            assert [one.id for one in weft.tenants.list(name=raw.parsed.name)] == [cats.id]
            return raw.headers["ETag"]

    assert await asyncio.to_thread(look)
    with pytest.raises(NotAuthenticated):
        async with AsyncWeftAdmin(admin.url, cats.key, retries=0) as weft:
            await weft.overview()


async def test_the_example_runs(admin: Admin) -> None:
    environment = {**os.environ, "WEFT_ADMIN_URL": admin.url, "WEFT_ADMIN_KEY": admin.key.secret}
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "examples.admin", cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE
    )
    printed, failed = await program.communicate()
    assert program.returncode == 0, failed.decode()
    assert "limit sessions: 0 of 8" in printed.decode()
    assert "tenant_restore" in printed.decode()
