"""Changes over the admin API hold at once, name the state that they change, and are repeated without harm; others keep theirs."""

import asyncio
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select, update

from cli.admin_client import segment
from contracts.operations import OperationKind
from store.tables import ApiKey, Tenant, WorkerProcess
from tenants.base_weights import record_first
from tests.api.admin.conftest import Admin
from tests.api.conftest import BASE
from tests.api.conftest import Tenant as Client


async def row_of(admin: Admin, tenant: str) -> dict[str, Any]:
    async with admin.service.database.read() as session:
        found = (await session.execute(select(Tenant.__table__).where(Tenant.id == tenant))).one()
    return dict(found._mapping)


async def test_a_change_of_a_state_that_has_changed_meanwhile_is_refused(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    path, beside = f"/tenants/{cats.id}", await row_of(admin, dogs.id)
    read = await admin.http.get(path)
    version = read.headers["etag"]
    assert (await admin.http.patch(path, json={"share": 2})).json()["code"] == "invalid_request"
    first, second = [
        await admin.http.patch(path, json={"share": share}, headers={"If-Match": version}) for share in (2, 3)
    ]
    assert (first.status_code, first.json()["share"]) == (200, 2)
    assert (second.status_code, second.json()["code"]) == (412, "edit_conflict")
    assert (await row_of(admin, cats.id))["share"] == 2
    limits = {"sessions": 5, "open_runs": 7}
    changed = await admin.http.patch(path, json={"limits": limits}, headers={"If-Match": first.headers["etag"]})
    assert changed.json()["limits"] == dict(sorted(limits.items()))
    lifted = await admin.http.patch(path, json={"limits": {"sessions": None}}, headers={"If-Match": "*"})
    assert lifted.json()["limits"] == {"open_runs": 7}
    for body in ({"share": 0}, {"limits": {"nothing": 1}}, {"limits": {"sessions": 0}}):
        assert (await admin.http.patch(path, json=body, headers={"If-Match": "*"})).status_code == 400, body
    assert await row_of(admin, dogs.id) == beside


async def count(admin: Admin, table: Any) -> int:
    async with admin.service.database.read() as session:
        return (await session.scalar(select(func.count()).select_from(table))) or 0


async def test_a_repeat_with_the_same_idempotency_key_makes_nothing_more(admin: Admin, cats: Client) -> None:
    headers = {"Idempotency-Key": "one"}
    made = [await admin.http.post("/tenants", json={"name": "cows"}, headers=headers) for _ in range(2)]
    assert [one.status_code for one in made] == [201, 201]
    assert made[0].json() == made[1].json()
    other = await admin.http.post("/tenants", json={"name": "pigs"}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (400, "sequence_conflict")
    assert (await admin.http.post("/tenants", json={"name": "cows"})).status_code == 400
    assert await count(admin, Tenant) == 2

    path, keys = f"/tenants/{cats.id}/keys", await count(admin, ApiKey)
    asked = {"note": "ci", "role": "viewer"}
    made = [await admin.http.post(path, json=asked, headers=headers) for _ in range(2)]
    assert made[0].json() == made[1].json()
    other = await admin.http.post(path, json={**asked, "role": "admin"}, headers=headers)
    assert other.json()["code"] == "sequence_conflict"
    rotation = f"/keys/{made[0].json()['key_id']}/rotation"
    turned = [await admin.http.post(rotation, json={"grace_seconds": 0}, headers=headers) for _ in range(2)]
    assert turned[0].json() == turned[1].json()
    assert await count(admin, ApiKey) == keys + 2
    secret = turned[0].json()["secret"]
    assert (await cats.http.get("/sessions", headers={"X-API-Key": secret})).status_code == 200


async def test_a_suspension_holds_from_the_next_request_on_and_for_one_tenant(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    path = f"/tenants/{cats.id}/suspension"
    held = await admin.http.put(path, json={"mode": "blocked", "reason": "unpaid"})
    assert held.json()["suspension"]["reason"] == "unpaid"
    refused = await cats.http.get("/sessions")
    assert (refused.status_code, refused.json()["code"]) == (403, "suspended")
    assert (await dogs.http.get("/sessions")).status_code == 200
    assert (await admin.http.delete(path)).json()["suspension"] is None
    assert (await cats.http.get("/sessions")).status_code == 200


async def test_what_is_not_there_is_404_and_changes_nothing(admin: Admin, cats: Client) -> None:
    before = await row_of(admin, cats.id)
    for method, path, body in (
        ("GET", "/tenants/nobody", None),
        ("PATCH", "/tenants/nobody", {"share": 2}),
        ("PUT", "/tenants/nobody/suspension", {}),
        ("DELETE", "/tenants/nobody/suspension", None),
        ("GET", "/tenants/nobody/standing", None),
        ("POST", "/tenants/nobody/keys", {}),
        ("POST", "/tenants/nobody/projects", {"name": "one"}),
        ("POST", "/keys/99999/rotation", {}),
        ("DELETE", "/keys/99999", None),
        ("GET", "/runs/nothing", None),
        ("POST", "/runs/nothing/move", {}),
        ("POST", "/runs/nothing/eviction", {}),
        ("POST", "/sessions/nothing/end", {}),
        ("GET", "/operations/nothing", None),
        ("POST", "/operations/nothing/cancellation", {}),
        ("POST", "/operations/nothing/requeue", None),
        ("PUT", "/gates/adapter/nothing", {}),
        ("PUT", "/trainers/nothing/drain", {}),
    ):
        answer = await admin.http.request(method, path, json=body, headers={"If-Match": "*"})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), (method, path)
    assert await row_of(admin, cats.id) == before


async def test_a_base_with_a_slash_in_its_name_has_a_gate_and_replicas(admin: Admin) -> None:
    paused = await admin.http.put(f"/gates/pool/{BASE}", json={"reason": "upgrade"})
    assert (paused.json()["key"], paused.json()["mode"]) == (f"pool:{BASE}", "keep")
    assert [one["key"] for one in (await admin.http.get("/gates")).json()["items"]] == [f"pool:{BASE}"]
    assert (await admin.http.delete(f"/gates/pool/{BASE}")).json()["mode"] is None
    asked = {"base_model": BASE, "directive": "drain", "reason": "hot"}
    assert (await admin.http.put("/replicas/one", json=asked)).json()["directive"] == "drain"
    assert (await admin.http.delete("/replicas/one", params={"base_model": BASE})).status_code == 204
    assert (await admin.http.get("/replicas")).json()["items"] == []


async def test_a_directive_is_refused_of_a_base_that_nobody_serves(admin: Admin) -> None:
    """A process, accepted weights or a setting make a base known. A replica's name may be one that is still to come."""
    now = admin.service.clock()
    place = {"host": "here", "pid": 7, "started_at": now, "expires_at": now}
    async with admin.service.database.write() as transaction:
        transaction.add(WorkerProcess(id="pool", kind="pool", base_model="served", **place))
        await record_first(transaction, "accepted", "0" * 64, now)
    asked = {"directive": "drain", "base_model": "no/such"}
    refused = await admin.http.put("/replicas/one", json=asked)
    assert (refused.status_code, refused.json()["code"]) == (400, "unknown_base_model")
    for known in ("served", "accepted", BASE):
        answer = await admin.http.put("/replicas/one", json=asked | {"base_model": known})
        assert (answer.status_code, answer.json()["process"]) == (200, None), answer.text
    listed = (await admin.http.get("/replicas")).json()["items"]
    assert sorted(one["base_model"] for one in listed) == sorted(["served", "accepted", BASE])


async def test_a_project_that_a_tenant_has_not_is_told_to_operators_with_the_tenants_list(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    (await admin.http.post(f"/tenants/{dogs.id}/projects", json={"name": "nope"})).raise_for_status()
    refused = await admin.http.post(f"/tenants/{cats.id}/keys", json={"projects": ["nope"]})
    assert "`weft project list --tenant cats`" in refused.json()["detail"]
    found = await admin.http.post(f"/tenants/{dogs.id}/keys", json={"projects": ["nope"]})
    assert found.status_code == 201


async def test_the_tenants_port_names_the_setting_of_the_admin_port(admin: Admin) -> None:
    async with httpx.AsyncClient() as http:
        astray = await http.get(f"{admin.service.url}/admin/v1/tenants")
        elsewhere = await http.get(f"{admin.service.url}/nothing")
    assert (astray.status_code, "the admin API listens on WEFT_ADMIN_PORT" in astray.json()["detail"]) == (404, True)
    own = await admin.http.get("/nothing")
    assert all("weft offers no GET" in one.json()["detail"] for one in (elsewhere, own))


async def test_the_queue_tells_who_fills_it_and_the_overview_what_each_is_entitled_to(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    flood, light = await cats.run(), await dogs.run()
    for seq_id in range(1, 5):
        await cats.operation(flood, seq_id)
    await dogs.operation(light)
    await admin.http.patch(f"/tenants/{cats.id}", json={"share": 3}, headers={"If-Match": "*"})
    (line,) = (await admin.http.get("/queue")).json()["items"]
    assert (line["base_model"], line["kind"], line["pending"]) == (BASE, OperationKind.OPTIM_STEP, 5)
    assert [(one["tenant"], one["pending"]) for one in line["filled_by"]] == [("cats", 4), ("dogs", 1)]
    seen = (await admin.http.get("/overview")).raise_for_status().json()
    loads = {one["name"]: one for one in seen["tenants"]}
    assert [loads[name]["pending"] for name in ("cats", "dogs")] == [4, 1]
    assert [loads[name]["entitled_share"] for name in ("cats", "dogs")] == pytest.approx([0.75, 0.25])


async def test_repeats_at_once_make_one_tenant(admin: Admin) -> None:
    headers = {"Idempotency-Key": "at once"}
    made = await asyncio.gather(
        *(admin.http.post("/tenants", json={"name": "cows"}, headers=headers) for _ in range(5))
    )
    assert {one.status_code for one in made} == {201}
    assert len({one.json()["key"]["secret"] for one in made}) == 1
    assert await count(admin, Tenant) == 1


@pytest.mark.parametrize(
    ("path", "longest", "body"),
    [("/replicas/", 200, {"base_model": BASE, "directive": "drain"}), ("/gates/pool/", 500, {})],
)
async def test_a_name_that_is_too_long_for_its_column_is_refused(
    admin: Admin, path: str, longest: int, body: dict[str, str]
) -> None:
    assert (await admin.http.put(path + "a" * longest, json=body)).status_code == 200
    refused = await admin.http.put(path + "a" * (longest + 1), json=body)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")


async def test_a_class_of_a_newer_version_is_shown_as_the_standard_one(
    admin: Admin, cats: Client, dogs: Client
) -> None:
    (
        await admin.http.patch(f"/tenants/{dogs.id}", json={"service_class": "batch"}, headers={"If-Match": "*"})
    ).raise_for_status()
    async with admin.service.database.write() as transaction:
        await transaction.execute(update(Tenant).where(Tenant.id == cats.id).values(service_class="reserved"))
    for path in ("/overview", f"/tenants/{cats.id}/standing"):
        (await admin.http.get(path)).raise_for_status()
    shown = [(await admin.http.get(f"/tenants/{one.id}")).raise_for_status().json() for one in (cats, dogs)]
    assert [one["service_class"] for one in shown] == ["standard", "batch"]


@pytest.mark.parametrize("name", ["cats/one", "a/limits", "/edge/", "plain % ?#ü"])
async def test_an_operator_bounds_a_project_by_its_name_whatever_characters_it_has(
    admin: Admin, cats: Client, dogs: Client, name: str
) -> None:
    for tenant in (cats, dogs):
        (await admin.http.post(f"/tenants/{tenant.id}/projects", json={"name": name})).raise_for_status()
    path = f"/tenants/{cats.id}/projects/{segment(name)}/limits"
    bounded = (await admin.http.put(path, json={"limits": {"sessions": 2}})).raise_for_status().json()
    assert (bounded["name"], bounded["limits"]) == (name, {"sessions": 2})
    others = (await admin.http.get(f"/tenants/{dogs.id}/projects")).json()["items"]
    assert [one["limits"] for one in others] == [{}, {}]
