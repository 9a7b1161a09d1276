"""Forms of operators' pages: each that changes something is in the audit log with who did it, or it is not done."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from unittest.mock import create_autospec

import httpx
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select, update

from api.admin.services import AdminServices
from api.dashboard.operators.app import create_operator_pages
from cli.admin_listener import serve_admin
from store.clock import utc_now
from store.tables import OperatorSession, Run, WorkerProcess
from tenants.operator_keys import create_operator_key, revoke_operator_key
from tenants.operator_sessions import make_operator_code
from tests.api.admin.conftest import Admin
from tests.api.audited_pages import OPERATORS, OPERATORS_UNAUDITED, entries, send_both_ways
from tests.api.conftest import BASE, Tenant
from tests.api.dashboard.visits import SAME, cookie_of, key_of


def _forms() -> Iterator[str]:
    """Return the path of each form of operators' pages."""
    for context in iter_route_contexts(create_operator_pages(create_autospec(AdminServices, instance=True)).routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute), context.path
        if (route.methods or set()) - {"GET", "HEAD"}:
            yield context.path or ""


def test_each_form_of_operators_is_audited_or_says_why_not() -> None:
    assert sorted(_forms()) == sorted([*(one.path for one in OPERATORS), *OPERATORS_UNAUDITED])


async def _trainers(admin: Admin, run: str) -> None:
    """Two trainers that live, of which one has the run."""
    now = utc_now()
    async with admin.service.database.write() as transaction:
        for name in ("trainer-1", "trainer-2"):
            place = {"base_model": BASE, "host": "here", "pid": 7, "started_at": now}
            transaction.add(WorkerProcess(id=name, kind="trainer", expires_at=now + timedelta(hours=1), **place))
        await transaction.flush()
        await transaction.execute(update(Run).where(Run.id == run).values(trainer_id="trainer-1"))


async def test_each_form_of_operators_makes_its_entries_with_the_operators_key_or_changes_nothing(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    """A second tenant has no entry."""
    run, service = await cats.run(), admin.service
    await _trainers(admin, run)
    ids = {"run_id": run, "session_id": run.partition(":")[0], "tenant_id": cats.id, "trainer_id": "trainer-1"}
    ids["key"] = admin.key.secret
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:
        for _ in range(2):
            http.headers.pop("cookie", None)
            begun = await http.post("/ops/login", data={"key": admin.key.secret})
            http.headers["cookie"] = cookie_of(begun)
        for change in OPERATORS:
            async with service.database.write() as transaction:
                others = select(OperatorSession.id).order_by(OperatorSession.id).limit(1)
                ids["number"] = str(await transaction.scalar(others))
                ids["code"] = (await make_operator_code(transaction, admin.key.prefix, service.clock()))[0]
            made = await send_both_ways(service, http, change, ids)
            assert tuple(one.action for one in made) == change.actions, change.path
            for one in made:
                who = (one.actor, one.key_id, one.role, one.door, one.address, one.outcome)
                assert who == (admin.key.prefix, admin.key.id, "operator", "ui", "127.0.0.1", "done"), change.path
                assert one.tenant_id in (cats.id, None)
                assert len(one.trace_id or "") == 32, change.path
    assert [one for one in await entries(service) if one.tenant_id == dogs.id] == []


async def _refusals_and_reads(admin: Admin, cats: Tenant) -> None:
    """Reads of usage by an operator, and a revoked key, an unknown one and wrong codes, on a listener that ends afterwards."""
    service = admin.service
    settings = service.services.runtime.settings.model_copy(update={"admin_port": 0})
    runtime = replace(service.services.runtime, settings=settings)
    async with service.database.write() as transaction:
        revoked = await create_operator_key(transaction, note="", expires_at=None, clock=service.clock)
        await revoke_operator_key(transaction, key=revoked.prefix, clock=service.clock)
    async with serve_admin(runtime, service.services.admission.loop_time) as url, httpx.AsyncClient(timeout=40) as http:
        own, window = {"X-API-Key": admin.key.secret}, {"since": "2026-01-01T00:00:00Z"}
        for _ in range(3):
            for path, asked in (("usage", {}), ("usage", {"tenant": "cats"}), (f"tenants/{cats.id}/usage", window)):
                answer = await http.get(f"{url}/admin/v1/{path}", params=asked, headers=own)
                assert answer.status_code == 200, answer.text
            for key in (revoked.secret, "tml-0123456789ab-" + "x" * 50):
                assert (await http.get(f"{url}/admin/v1/tenants", headers={"X-API-Key": key})).status_code == 401
                assert (await http.post(f"{url}/ops/login", data={"key": key}, headers=SAME)).status_code == 401
            assert (await http.post(f"{url}/ops/login/code", data={"code": "guess"}, headers=SAME)).status_code == 401
    told = [
        (one.action, one.actor, one.tenant_id, one.after["count"])
        for one in await entries(service)
        if one.action in ("usage_read", "request_refuse")
    ]
    assert sorted(told, key=str) == sorted(
        [
            ("usage_read", admin.key.prefix, None, 3),
            ("usage_read", admin.key.prefix, cats.id, 6),
            ("request_refuse", revoked.prefix, None, 6),
            ("request_refuse", "unknown keys", None, 9),
        ],
        key=str,
    )


async def test_reads_of_usage_and_refused_keys_of_operators_are_counted(
    admin: Admin, cats: Tenant, dogs: Tenant
) -> None:
    """The tenant whose usage it was reads of an operator without a name; another tenant hears of none of it."""
    await _refusals_and_reads(admin, cats)
    for tenant, count in ((cats, 1), (dogs, 0)):
        key = await key_of(admin.service, tenant)
        shown = await tenant.http.get(f"{admin.service.url}/api/weft/v1/audit", headers={"X-API-Key": key.secret})
        read = [one for one in shown.raise_for_status().json()["entries"] if one["action"] == "usage_read"]
        assert [(one["actor"], one["address"]) for one in read] == [("operator", None)] * count
        assert admin.key.prefix not in shown.text
