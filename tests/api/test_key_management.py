"""Keys that tenants make themselves: bounded by their maker's rights, rotated with a grace, revoked, seen used."""

from datetime import timedelta

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import event, select

from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from store.tables import ApiKey, AuditEntry
from tenants.budget_settings import BudgetName, set_budget
from tenants.budgets import Period
from tenants.key_text import is_mistyped
from tenants.keys import create_key, find_key, rotate_key
from tenants.limits import set_tenant
from tenants.rights import KeyRights, Role, Scope
from tenants.spending import payers_of
from tests.api.conftest import as_administrator


@pytest_asyncio.fixture
async def admin(cats, service):
    """A client with an administrator's key of cats."""
    async with service.database.write() as transaction:
        rights = KeyRights(role=Role.ADMIN)
        key = await create_key(transaction, tenant=cats.id, note="admin", clock=service.clock, rights=rights)
    async with httpx.AsyncClient(
        base_url=f"{service.url}/api/weft/v1", headers={"X-API-Key": key.secret}, timeout=40
    ) as http:
        yield http


async def _status(service, key: str) -> int:
    async with httpx.AsyncClient(base_url=service.url, headers={"X-API-Key": key}, timeout=40) as http:
        return (await http.post("/api/v1/client/config", json={})).status_code


async def _made(admin: httpx.AsyncClient, **asked: object) -> dict:
    answer = await admin.post("/keys", json=asked)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_key_has_the_rights_that_were_asked_for(admin, dogs, service) -> None:
    ends = (service.clock() + timedelta(days=1)).isoformat()
    bounds = {"base_models": ["test/tiny"], "max_rank": 8, "networks": ["127.0.0.0/8"]}
    made = await _made(
        admin, note="eval", role="member", scopes=["sample"], projects=["default"], expires_at=ends, **bounds
    )
    assert await _status(service, made["secret"]) == 200
    (row,) = [one for one in (await admin.get("/keys")).json()["keys"] if one["key_id"] == made["key_id"]]
    assert (row["note"], row["role"], row["scopes"], row["max_rank"]) == ("eval", "member", ["sample"], 8)
    assert (row["prefix"], row["last_used_at"]) == (made["prefix"], None)
    foreign = f"{service.url}/api/weft/v1/keys/{made['key_id']}"
    assert (await dogs.http.delete(foreign)).status_code == 403
    assert await _status(service, made["secret"]) == 200


@pytest.mark.parametrize(
    ("asked", "excess"),
    [
        ({"role": "admin", "scopes": ["usage"]}, "scope usage"),
        ({"role": "member", "scopes": ["train"]}, "scope train"),
        ({"base_models": ["other"]}, "base_models"),
        ({"max_rank": 9}, "max_rank"),
        ({"networks": ["0.0.0.0/0"]}, "networks"),
        ({"expires_at": "2027-01-01T00:00:00Z"}, "expires_at"),
        ({"projects": ["elsewhere"]}, "project"),
    ],
)
async def test_nobody_gives_away_more_than_the_own_key_may(admin, service, asked: dict, excess: str) -> None:
    ends = (service.clock() + timedelta(days=1)).isoformat()
    bounds = {"base_models": ["test/tiny"], "max_rank": 8, "networks": ["127.0.0.0/8"], "expires_at": ends}
    own = await _made(admin, role="admin", scopes=["keys", "read"], projects=["default"], **bounds)
    headers = {"X-API-Key": own["secret"]}
    before = (await admin.get("/keys")).json()
    refused = await admin.post("/keys", headers=headers, json={"role": "viewer", **asked})
    assert (refused.status_code, excess in refused.json()["detail"]) == (403, True), refused.text
    for key in before["keys"]:
        if key["key_id"] != own["key_id"]:
            path = f"/keys/{key['key_id']}"
            assert (await admin.post(f"{path}/rotate", headers=headers, json={})).status_code == 403
            assert (await admin.delete(path, headers=headers)).status_code == 403
    after = (await admin.get("/keys")).json()
    assert [one["revoked_at"] for one in after["keys"]] == [None] * len(before["keys"])
    child = (await admin.post("/keys", headers=headers, json={"role": "viewer"})).json()
    (row,) = [one for one in (await admin.get("/keys")).json()["keys"] if one["key_id"] == child["key_id"]]
    assert (row["base_models"], row["max_rank"], row["networks"]) == (["test/tiny"], 8, ["127.0.0.0/8"])
    assert row["expires_at"] is not None


async def test_a_key_with_a_budget_makes_keys_that_spend_of_it_and_manages_no_others(admin, dogs, service) -> None:
    """A tenant's other keys, and those of another tenant, spend of their own."""
    own, free = await _made(admin, role="admin"), await _made(admin, role="admin")
    headers, name = {"X-API-Key": own["secret"]}, BudgetName(Period.TOTAL, key=own["key_id"])
    async with service.database.write() as transaction:
        row = await transaction.get_one(ApiKey, own["key_id"])
        theirs = await create_key(transaction, tenant=dogs.id, note="", clock=service.clock)
        await set_budget(transaction, TenantId(row.tenant_id), name, 100, service.clock())
    made = (await admin.post("/keys", headers=headers, json={"role": "admin"})).raise_for_status().json()
    again = await admin.post("/keys", headers={"X-API-Key": made["secret"]}, json={})
    last = again.raise_for_status().json()
    path = f"/keys/{free['key_id']}"
    for method, at in (("POST", f"{path}/rotate"), ("DELETE", path)):
        refused = await admin.request(method, at, headers=headers, json={})
        assert (refused.status_code, "budget" in refused.json()["detail"]) == (403, True)
    rotated = await admin.post(f"/keys/{made['key_id']}/rotate", headers=headers, json={})
    heir = rotated.raise_for_status().json()
    keys = [one["key_id"] for one in (own, free, made, last, heir)]
    async with service.database.read() as session:
        payers = await payers_of(session, [*keys, theirs.id])
    mine = own["key_id"]
    assert payers == dict.fromkeys([mine, *keys[2:]], mine) | {free["key_id"]: free["key_id"], theirs.id: theirs.id}
    assert (await admin.post(f"/keys/{own['key_id']}/rotate", json={})).status_code == 201


async def test_rates_that_keys_share_are_set_by_one_that_has_the_rights_of_all_and_told_for_each(
    admin, cats, dogs, service
) -> None:
    """A key that has ended stands in nobody's way, and no key of another group or tenant is touched."""
    head, free = await _made(admin, role="admin"), await _made(admin, role="admin")
    async with service.database.write() as transaction:
        await set_budget(transaction, cats.id, BudgetName(Period.TOTAL, key=head["key_id"]), 100, service.clock())
        theirs = await create_key(transaction, tenant=dogs.id, note="", clock=service.clock)
    by_head = {"X-API-Key": head["secret"]}
    asked = {"role": "admin", "scopes": ["keys", "read"]}
    clerk, peer = [(await admin.post("/keys", headers=by_head, json=asked)).raise_for_status().json() for _ in range(2)]
    by_clerk, rates = {"X-API-Key": clerk["secret"]}, {"limits": {"requests_per_minute": 50}}
    for key in (clerk, peer, head):
        refused = await admin.put(f"/keys/{key['key_id']}/limits", headers=by_clerk, json=rates)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    set_by_head = await admin.put(f"/keys/{clerk['key_id']}/limits", headers=by_head, json=rates)
    assert set_by_head.raise_for_status().json()["limits"] == rates["limits"]
    told = select(AuditEntry.resource_id, AuditEntry.after).where(AuditEntry.action == "key_set")
    async with service.database.read() as session:
        entries = {row.resource_id: row.after for row in await session.execute(told)}
        rows = {row.id: row.limits for row in await session.scalars(select(ApiKey))}
    assert entries == {key["prefix"]: rates for key in (head, clerk, peer)}
    assert {id for id, limits in rows.items() if limits} == {key["key_id"] for key in (head, clerk, peer)}
    assert {free["key_id"], theirs.id} <= rows.keys()
    await admin.delete(f"/keys/{head['key_id']}", headers=by_head)
    lower = {"limits": {"requests_per_minute": 40}}
    assert (await admin.put(f"/keys/{peer['key_id']}/limits", headers=by_clerk, json=lower)).status_code == 200


@pytest.mark.parametrize(
    "asked",
    [
        {"role": "operator"},
        {"networks": ["10.0.0.1/8"]},
        {"networks": ["here"]},
        {"expires_at": "2020-01-01T00:00:00Z"},
        {"max_rank": 0},
        {"scopes": []},
        {"scopes": ["fly"]},
        {"role": "viewer", "scopes": ["train", "sample"]},
    ],
)
async def test_bounds_that_make_no_sense_are_400(admin, asked: dict) -> None:
    answer = await admin.post("/keys", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert len((await admin.get("/keys")).json()["keys"]) == 2


async def test_a_rotated_key_works_beside_the_new_one_until_its_last_second(admin, service) -> None:
    old = await _made(admin, role="viewer", note="job")
    answer = await admin.post(f"/keys/{old['key_id']}/rotate", json={"grace_seconds": 60})
    new = answer.json()
    service.clock.move(seconds=59)
    assert [await _status(service, key["secret"]) for key in (old, new)] == [200, 200]
    service.clock.move(seconds=1)
    assert [await _status(service, key["secret"]) for key in (old, new)] == [401, 200]
    rows = {one["key_id"]: one for one in (await admin.get("/keys")).json()["keys"]}
    assert rows[new["key_id"]]["role"] == "viewer"
    assert rows[new["key_id"]]["note"] == "job"
    assert (await admin.post(f"/keys/{old['key_id']}/rotate", json={})).status_code == 400


async def test_a_repeat_makes_no_third_key_and_returns_the_second_one(admin, service) -> None:
    old = await _made(admin, role="viewer")
    path, headers = f"/keys/{old['key_id']}/rotate", {"Idempotency-Key": "once"}
    answers = [await admin.post(path, headers=headers, json={"grace_seconds": 60}) for _ in range(3)]
    assert len({answer.text for answer in answers}) == 1
    assert await _status(service, answers[0].json()["secret"]) == 200
    made = [(await admin.post("/keys", headers=headers, json={"role": "viewer"})).json() for _ in range(2)]
    assert made[0] == made[1] != answers[0].json()
    other = await admin.post("/keys", headers=headers, json={"role": "member"})
    assert (other.status_code, other.json()["code"]) == (400, "sequence_conflict")
    assert len((await admin.get("/keys")).json()["keys"]) == 5


async def test_a_tenant_makes_no_more_keys_than_its_limit_and_a_rotation_without_grace_needs_no_room(
    admin, dogs, service
) -> None:
    async with service.database.write() as transaction:
        await set_tenant(transaction, name="cats", limits={"keys": 4})
    ends = (service.clock() + timedelta(hours=1)).isoformat()
    last, _ = await _made(admin, role="viewer"), await _made(admin, role="viewer", expires_at=ends)
    refused = [
        await admin.post("/keys", json={"role": "viewer"}),
        await admin.post(f"/keys/{last['key_id']}/rotate", json={"grace_seconds": 60}),
    ]
    assert [(answer.status_code, answer.json()["code"]) for answer in refused] == [(400, "invalid_request")] * 2
    assert "you have 4 keys" in refused[0].json()["detail"]
    assert [await _status(service, last["secret"]), (await dogs.http.get("/auth/apikey/me")).status_code] == [200, 200]
    rotated = await admin.post(f"/keys/{last['key_id']}/rotate", json={"grace_seconds": 0})
    assert rotated.status_code == 201
    standing = (await admin.get("/usage/standing")).json()["limits"]
    assert [(one["used"], one["is_reached"]) for one in standing if one["name"] == "keys"] == [(4, True)]
    service.clock.move(hours=1)
    await _made(admin, role="viewer")


async def test_a_rotation_that_is_cut_off_leaves_the_one_key(admin, cats, service) -> None:
    old = await _made(admin, role="viewer")

    async def cut_off() -> None:
        async with service.database.write() as transaction:
            key = await find_key(transaction, cats.id, old["key_id"])
            await rotate_key(transaction, key, grace=timedelta(0), clock=service.clock)
            raise InvalidRequest("cut off")

    with pytest.raises(InvalidRequest):
        await cut_off()
    assert await _status(service, old["secret"]) == 200
    assert len((await admin.get("/keys")).json()["keys"]) == 3


async def test_a_key_rotates_and_revokes_itself_and_no_other_without_the_scope(cats, dogs, service) -> None:
    me = (await cats.http.get("/auth/apikey/me")).json()["key_id"]
    other = (await dogs.http.get("/auth/apikey/me")).json()["key_id"]
    url = f"{service.url}/api/weft/v1/keys"
    assert (await cats.http.post(f"{url}/{other}/rotate", json={})).status_code == 403
    new = (await cats.http.post(f"{url}/{me}/rotate", json={"grace_seconds": 60})).json()
    assert [await _status(service, key) for key in (cats.key, new["secret"])] == [200, 200]
    assert (await cats.http.delete(f"{url}/{me}")).status_code == 204
    assert [await _status(service, key) for key in (cats.key, new["secret"])] == [401, 200]
    mine = {"X-API-Key": new["secret"]}
    assert (await cats.http.delete(f"{url}/{new['key_id']}", headers=mine)).status_code == 204
    assert await _status(service, new["secret"]) == 401


@pytest.mark.parametrize("grace", [0, 59])
async def test_a_key_that_rotates_itself_can_repeat_it_when_the_answer_is_lost(
    admin, cats, service, grace: int
) -> None:
    """A grace that leaves no time for a repeat is refused and ends nothing; of another key it is the caller's affair."""
    me = (await cats.http.get("/auth/apikey/me")).json()["key_id"]
    url, once = f"{service.url}/api/weft/v1/keys/{me}/rotate", {"Idempotency-Key": "once"}
    refused = await cats.http.post(url, headers=once, json={"grace_seconds": grace})
    assert (refused.status_code, "60 seconds or more" in refused.json()["detail"]) == (400, True)
    assert await _status(service, cats.key) == 200
    await cats.http.post(url, headers=once, json={"grace_seconds": 60})
    service.clock.move(seconds=59)
    repeated = await cats.http.post(url, headers=once, json={"grace_seconds": 60})
    service.clock.move(seconds=1)
    assert [await _status(service, key) for key in (cats.key, repeated.json()["secret"])] == [401, 200]
    assert (await admin.post(f"/keys/{repeated.json()['key_id']}/rotate", json={"grace_seconds": 0})).status_code == 201


async def test_an_administrator_sees_no_key_of_another_tenant(admin, dogs) -> None:
    other = (await dogs.http.get("/auth/apikey/me")).json()["key_id"]
    assert (await admin.post(f"/keys/{other}/rotate", json={})).status_code == 404
    assert (await admin.delete(f"/keys/{other}")).status_code == 404
    assert other not in [one["key_id"] for one in (await admin.get("/keys")).json()["keys"]]
    assert (await dogs.http.get("/auth/apikey/me")).status_code == 200


async def test_a_mistyped_key_is_refused_without_a_query(cats, service) -> None:
    statements: list[str] = []
    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    typo = cats.key[:20] + ("a" if cats.key[20] != "a" else "b") + cats.key[21:]
    assert (is_mistyped(cats.key), is_mistyped(typo)) == (False, True)
    assert await _status(service, typo) == 401
    assert [one for one in statements if "api_keys" in one] == []
    assert await _status(service, cats.key) == 200
    assert [one for one in statements if "api_keys" in one] != []


async def test_uses_are_written_once_a_minute_however_many_requests(cats, dogs, service) -> None:
    updates: list[str] = []

    def note(*given: object) -> None:
        if str(given[2]).startswith("UPDATE api_keys"):
            updates.append(str(given[2]))

    event.listen(service.database.engine.sync_engine, "before_cursor_execute", note)
    uses = service.services.key_uses
    for _ in range(20):
        assert (await cats.http.post("/client/config", json={})).status_code == 200
        await uses.write()
    assert len(updates) == 1
    async with service.database.read() as session:
        rows = (await session.execute(select(ApiKey.tenant_id, ApiKey.last_used_at))).all()
    used = {row.tenant_id: row.last_used_at for row in rows}
    assert (used[cats.id], used[dogs.id]) == (service.clock().replace(second=0, microsecond=0), None)
    service.clock.move(seconds=61)
    await cats.http.post("/client/config", json={})
    await uses.write()
    assert len(updates) == 2


async def test_a_key_of_some_scopes_is_not_revoked_by_a_lesser_one(admin, service) -> None:
    lesser = await _made(admin, role="admin", scopes=[Scope.KEYS])
    member = await _made(admin, role="member")
    refused = await admin.delete(f"/keys/{member['key_id']}", headers={"X-API-Key": lesser["secret"]})
    assert refused.status_code == 403
    assert await _status(service, member["secret"]) == 200


async def test_a_keys_bounds_are_few_and_short_texts(admin, dogs) -> None:
    """A refusal says what to change, and a neighbour's list stays its own."""
    long = await admin.post("/keys", json={"base_models": ["x" * 201]})
    assert (long.status_code, "base_models" in long.text) == (400, True), long.text
    many = await admin.post("/keys", json={"base_models": [f"{number:02}{'é' * 99}" for number in range(50)]})
    assert (many.status_code, "Name fewer" in many.text) == (400, True), many.text
    made = await _made(admin, base_models=[f"{number:02}{'x' * 150}" for number in range(50)])
    assert made["key_id"] in [one["key_id"] for one in (await admin.get("/keys")).json()["keys"]]
    theirs = await as_administrator(dogs)
    listed = (await theirs.http.get(f"{dogs.service.url}/api/weft/v1/keys")).json()["keys"]
    assert made["key_id"] not in [one["key_id"] for one in listed]
