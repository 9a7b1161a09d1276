"""Acts of operators over the admin API: each is in the audit log, with the operator's key, in its own transaction."""

import html
import re

import httpx
from fastapi.routing import APIRoute, iter_route_contexts
from sqlalchemy import select, text

from api.admin.app import create_admin_app
from api.admin.services import AdminServices
from store.tables import AuditEntry, Tenant
from tests.api.admin.conftest import Admin
from tests.api.dashboard.visits import SAME, cookie_of, key_of

AUDITED = {
    "POST /tenants": ["tenant_create", "key_create"],
    "PATCH /tenants/*": ["tenant_set"],
    "PUT /tenants/*/budgets/*": ["tenant_budget"],
    "PUT /tenants/*/suspension": ["tenant_suspend"],
    "DELETE /tenants/*/suspension": ["tenant_resume"],
    "PUT /tenants/*/deletion": ["tenant_delete"],
    "DELETE /tenants/*/deletion": ["tenant_restore"],
    "POST /tenants/*/keys": ["key_create"],
    "POST /tenants/*/projects": ["project_create"],
    "PUT /tenants/*/projects/*/limits": ["project_set"],
    "POST /keys/*/rotation": ["key_rotate"],
    # One for the key and one for that in whose place it is: they share the rates.
    "PUT /keys/*/limits": ["key_set", "key_set"],
    "DELETE /keys/*": ["key_revoke"],
    "PUT /gates/*/*": ["gate_pause"],
    "DELETE /gates/*/*": ["gate_resume"],
    "POST /prices": ["price_add"],
    "POST /tenants/*/prices": ["price_add"],
    "PUT /replicas/*": ["replica_direct"],
    "DELETE /replicas/*": ["replica_direct"],
    "PUT /bases/*": ["base_accept"],
    "DELETE /checkpoints/*/*/*": ["checkpoint_delete"],
    "PUT /runs/*/weight": ["run_weigh"],
    "PUT /tenants/*/webhooks/*": ["webhook_set"],
    "POST /tenants/*/webhooks/*/secret": ["webhook_rotate"],
    "POST /tenants/*/webhooks/*/test": ["webhook_test"],
    "DELETE /tenants/*/webhooks/*": ["webhook_delete"],
}
BY_COMMAND = {
    "POST /sessions/*/end",
    "POST /operations/*/cancellation",
    "POST /operations/*/failure",
    "POST /operations/*/requeue",
    "POST /runs/*/move",
    "POST /runs/*/eviction",
    "PUT /trainers/*/drain",
    "DELETE /trainers/*/drain",
    "POST /tenants/*/webhooks/*/events/*/retry",
}
"""Routes whose entries ``tests/cli/test_audit.py`` looks at: its commands send the same requests."""
UNAUDITED = {"POST /housekeeping/runs": "it does what housekeeping does anyway"}


def test_each_admin_route_that_changes_something_is_audited_or_says_why_not(admin: Admin) -> None:
    found = set()
    parts = [None] * 5
    app = create_admin_app(AdminServices(admin.service.services.runtime, *parts))  # type: ignore[arg-type]
    for context in iter_route_contexts(app.routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        if isinstance(route, APIRoute):
            path = (context.path or "").removeprefix("/admin/v1")
            named = "/".join("*" if "{" in part else part for part in path.split("/"))
            found |= {f"{method} {named}" for method in route.methods - {"GET", "HEAD"}}
    assert found == AUDITED.keys() | BY_COMMAND | UNAUDITED.keys()


async def test_each_change_makes_its_entries_with_the_operators_key(admin: Admin, cats, dogs) -> None:
    run, made = await cats.run(), {}
    key = (await admin.http.post(f"/tenants/{cats.id}/keys", json={})).raise_for_status().json()["key_id"]
    gate, replica, bell = f"/gates/adapter/{run}", "/replicas/vllm-0", f"/tenants/{cats.id}/webhooks/bell"
    sent = [
        ("POST", "/tenants", {"name": "birds"}),
        ("PATCH", f"/tenants/{cats.id}", {"share": 2.0}),
        ("PUT", f"/tenants/{cats.id}/budgets/day", {"amount": 1000}),
        ("PUT", f"/tenants/{cats.id}/suspension", {"reason": "unpaid"}),
        ("DELETE", f"/tenants/{cats.id}/suspension", None),
        ("PUT", f"/tenants/{cats.id}/deletion", {"mode": "read_only"}),
        ("DELETE", f"/tenants/{cats.id}/deletion", None),
        ("POST", f"/tenants/{cats.id}/keys", {"note": "second"}),
        ("POST", f"/tenants/{cats.id}/projects", {"name": "archive"}),
        ("PUT", f"/tenants/{cats.id}/projects/archive/limits", {"limits": {"sessions": 2}}),
        ("POST", f"/keys/{key}/rotation", {}),
        ("PUT", f"/keys/{key}/limits", {"limits": {"train_tokens_per_minute": 60}}),
        ("DELETE", f"/keys/{key}", None),
        ("PUT", gate, {}),
        ("DELETE", gate, None),
        ("POST", "/prices", {"meter": "train_tokens", "amount": "1.5"}),
        ("POST", f"/tenants/{cats.id}/prices", {"meter": "train_tokens", "amount": "1.2"}),
        ("PUT", replica, {"base_model": "test/tiny", "directive": "drain"}),
        ("DELETE", f"{replica}?base_model=test/tiny", None),
        ("PUT", "/bases/test/tiny", {"fingerprint": "0" * 64}),
        ("DELETE", f"/checkpoints/{run}/weights/one", None),
        ("PUT", f"/runs/{run}/weight", {"weight": 3.0}),
        ("PUT", bell, {"url": "https://bell.example/hooks/T0000000000000000000000"}),
        ("POST", f"{bell}/secret", None),
        ("POST", f"{bell}/test", None),
        ("DELETE", bell, None),
    ]
    await cats.checkpoint(run, "one")
    for (method, path, body), name in zip(sent, AUDITED, strict=True):
        before = len(await _entries(admin))
        (await _send(admin, method, path, body)).raise_for_status()
        made[name] = (await _entries(admin))[before:]
    assert {name: [one.action for one in told] for name, told in made.items()} == AUDITED
    every = [one for told in made.values() for one in told]
    assert {(one.actor, one.door, one.role, one.address) for one in every} == {
        (admin.key.prefix, "admin", "operator", "127.0.0.1")
    }
    assert all(len(one.trace_id or "") == 32 for one in every)
    birds = next(one.tenant_id for one in every if one.action == "tenant_create")
    assert {one.tenant_id for one in every} == {cats.id, birds, None}
    assert [one for one in await _entries(admin) if one.tenant_id == dogs.id] == []
    told = str([(one.before, one.after) for one in every])
    assert admin.key.secret not in told
    assert ("https://bell.example" in told, "T0000000000000000000000" in told) == (True, False)


async def test_a_tenant_is_told_no_operators_name_or_address_whatever_the_door(admin: Admin, cats, dogs) -> None:
    """Come by the admin API, by the operators' pages, and in a look at the tenant's. Another tenant hears of none of it."""
    prefix, elsewhere = admin.key.prefix, {"X-Forwarded-For": "10.9.8.7"}
    (await admin.http.put(f"/tenants/{cats.id}/suspension", json={"reason": "unpaid"})).raise_for_status()
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as pages:
        begun = await pages.post("/ops/login", data={"key": admin.key.secret})
        pages.headers["cookie"] = cookie_of(begun)
        assert (await pages.post(f"/ops/tenants/{cats.id}/resume", data={"version": "*"})).status_code == 303
        look = await pages.post(f"/ops/tenants/{cats.id}/look", data={"reason": "ticket 7"})
    code = re.search(r"code=([\w-]+)", html.unescape(look.text))
    assert code is not None
    keys = [await key_of(admin.service, tenant) for tenant in (cats, dogs)]
    async with httpx.AsyncClient(base_url=admin.service.url, timeout=40, headers=SAME | elsewhere) as viewer:
        begun = await viewer.post("/ui/login/code", data={"code": code[1]})
        viewer.headers["cookie"] = cookie_of(begun)
        assert (await viewer.get("/ui/audit")).status_code == 403
        assert (await viewer.get("/ui")).status_code == 200
    await admin.service.services.audit_tally.write()
    told = []
    for key in keys:
        async with httpx.AsyncClient(base_url=admin.service.url, headers={"X-API-Key": key.secret}) as http:
            told.append(
                [(await http.get(path)).raise_for_status() for path in ("/api/weft/v1/audit", "/api/weft/v1/keys")]
            )
    audit, made = told[0][0].json()["entries"], told[0][1].json()["keys"]
    by_operators = [one for one in audit if one["action"] in ("tenant_suspend", "tenant_resume", "tenant_look")]
    assert {(one["actor"], one["key_id"], one["address"]) for one in by_operators} == {("operator", None, None)}
    assert len(by_operators) == 3
    assert {one["address"] for one in audit if one["action"] in ("login_begin", "request_refuse")} == {None}
    assert [one["note"] for one in made if "ticket" in one["note"]] == ["look of an operator: ticket 7"]
    assert not [answer.text for answer in told[0] if prefix in answer.text or "10.9.8.7" in answer.text]
    assert not [answer.text for answer in told[1] if "tenant_" in answer.text or "ticket" in answer.text]
    async with httpx.AsyncClient(base_url=admin.service.url, headers={"X-API-Key": keys[0].secret}) as http:
        assert (await http.get(f"/api/weft/v1/audit?key={prefix}")).json()["entries"] == []


async def test_what_an_operator_does_is_not_done_without_its_entry(admin: Admin, cats) -> None:
    refuse = "CREATE TRIGGER refuse BEFORE INSERT ON audit_entries BEGIN SELECT RAISE(ABORT, 'no room'); END"
    async with admin.service.database.write() as transaction:
        await transaction.execute(text(refuse))
    for method, path, body in (
        ("PATCH", f"/tenants/{cats.id}", {"share": 2.0}),
        ("PUT", f"/tenants/{cats.id}/suspension", {}),
        ("POST", "/tenants", {"name": "birds"}),
    ):
        assert (await _send(admin, method, path, body)).status_code >= 500
    async with admin.service.database.read() as session:
        rows = list(await session.scalars(select(Tenant)))
    assert [(row.name, row.share, row.suspended_at) for row in rows] == [("cats", 1.0, None)]


async def test_a_wrong_operators_key_is_refused_as_ever(admin: Admin) -> None:
    refused = await admin.http.get("/tenants", headers={"X-API-Key": "tml-0123456789ab-" + "x" * 50})
    assert refused.status_code == 401


async def _send(admin: Admin, method: str, path: str, body: dict | None) -> httpx.Response:
    """Send the request; a change names the state that was read."""
    headers = {"If-Match": (await admin.http.get(path)).headers["etag"]} if method == "PATCH" else {}
    return await admin.http.request(method, path, json=body, headers=headers)


async def _entries(admin: Admin) -> list[AuditEntry]:
    async with admin.service.database.read() as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))
