"""Forms of operators' pages: each that changes something is in the audit log with who did it, or it is not done."""

from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import create_autospec

import httpx
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select, update

from api.admin.services import AdminServices
from api.dashboard.operators.app import create_operator_pages
from store.clock import utc_now
from store.tables import OperatorSession, Run, WorkerProcess
from tenants.operator_sessions import make_operator_code
from tests.api.admin.conftest import Admin
from tests.api.audited_pages import OPERATORS, OPERATORS_UNAUDITED, entries, send_both_ways
from tests.api.conftest import BASE, Tenant
from tests.api.dashboard.visits import SAME, cookie_of


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
