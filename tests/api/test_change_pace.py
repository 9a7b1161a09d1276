"""Bounds of what a tenant may repeat at will: its changes have a pace, its keys and its projects a number."""

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import func, select

from api.change_pace import ChangePace
from contracts.errors import OverRate
from contracts.ids import TenantId
from store.settings import Settings
from store.tables import ApiKey, AuditEntry
from tenants import keys, projects, webhooks
from tenants.keys import create_key
from tenants.rights import KeyRights, Role
from tests.api.conftest import BASE, Service, Tenant

CHANGES = 12
CATS, DOGS = TenantId("cats"), TenantId("dogs")
WEFT = "/api/weft/v1"


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with few changes an hour."""
    return settings.model_copy(update={"tenant_changes": CHANGES})


async def admin_key(service: Service, tenant: Tenant) -> str:
    """The secret of a new administrator's key."""
    async with service.database.write() as transaction:
        rights = KeyRights(role=Role.ADMIN)
        made = await create_key(transaction, tenant=tenant.id, note="admin", clock=service.clock, rights=rights)
    return made.secret


@pytest_asyncio.fixture
async def admin(service: Service, cats: Tenant):
    """A client with an administrator's key of cats."""
    key = await admin_key(service, cats)
    async with httpx.AsyncClient(base_url=service.url + WEFT, headers={"X-API-Key": key}, timeout=40) as http:
        yield http


@pytest_asyncio.fixture
async def theirs(service: Service, dogs: Tenant):
    """A client with an administrator's key of dogs."""
    key = await admin_key(service, dogs)
    async with httpx.AsyncClient(base_url=service.url + WEFT, headers={"X-API-Key": key}, timeout=40) as http:
        yield http


async def test_a_flood_of_changes_makes_bounded_entries_and_a_key_is_revoked_all_the_same(
    service: Service, cats: Tenant, dogs: Tenant, admin: httpx.AsyncClient
) -> None:
    """Any key may end its sessions and rotate itself, as often as it likes."""
    answers: list[httpx.Response] = []
    for _ in range(CHANGES + 2):
        session = await cats.session()
        answers.append(await cats.http.post(f"/sessions/{session}/finish", json={}))
    assert [answer.status_code for answer in answers] == [204] * CHANGES + [429] * 2
    assert answers[-1].json()["code"] == "over_rate"
    assert 0 < int(answers[-1].headers["retry-after"]) <= 3600 / CHANGES
    assert (await dogs.http.post(f"/sessions/{await dogs.session()}/finish", json={})).status_code == 204
    own = (await admin.get("/keys")).json()["keys"][0]["key_id"]
    assert (await admin.post(f"/keys/{own}/rotate", json={})).status_code == 429
    assert (await admin.delete(f"/keys/{own}")).status_code == 204
    assert (await cats.http.get("/sessions")).status_code == 401
    async with service.database.read() as session:
        count = select(func.count()).select_from(AuditEntry).where(AuditEntry.tenant_id == cats.id)
        assert await session.scalar(count.where(AuditEntry.action == "session_end")) == CHANGES


async def test_metadata_counts_by_its_size(cats: Tenant, dogs: Tenant) -> None:
    """Rows of ended sessions and models stay for a month and longer, with all of it."""
    session, much = await cats.session(), {"text": "x" * 10_000}
    asked = {"session_id": session, "base_model": BASE, "lora_config": {"rank": 4}}
    answers = [
        await cats.http.post("/create_session", json={"user_metadata": much}),
        await cats.http.post("/create_session", json={"user_metadata": much}),
        await cats.http.post("/create_model", json={**asked, "model_seq_id": 0, "user_metadata": much}),
        await cats.http.post("/create_session", json={"user_metadata": {"text": "x"}}),
        await cats.http.post("/create_model", json={**asked, "model_seq_id": 1}),
        await dogs.http.post("/create_session", json={"user_metadata": much}),
    ]
    assert [answer.status_code for answer in answers] == [200, 429, 429, 200, 200, 200]


def test_changes_come_back_over_the_hour_and_each_tenant_has_its_own() -> None:
    now = 0.0
    pace = ChangePace(60, clock=lambda: now)

    def taken(tenant: TenantId) -> int:
        for count in range(1000):
            try:
                pace.count(tenant)
            except OverRate:
                return count
        raise AssertionError("no bound")

    assert taken(CATS) == 60
    with pytest.raises(OverRate) as refused:
        pace.count(CATS)
    assert refused.value.retry_after == 60
    now += 600
    assert (taken(CATS), taken(DOGS)) == (10, 60)
    now += 10**6
    assert taken(CATS) == 60


async def test_ended_keys_make_room_a_day_later_and_live_ones_stay(
    service: Service, admin: httpx.AsyncClient, theirs: httpx.AsyncClient, clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, made, _ = [
        (await client.post("/keys", json={"role": "member"})).raise_for_status().json()
        for client in (theirs, admin, theirs)
    ]
    (await theirs.delete(f"/keys/{kept['key_id']}")).raise_for_status()
    monkeypatch.setattr(keys, "MOST_KEYS", 3)
    refused = await admin.post("/keys", json={"role": "member"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request")
    (await admin.delete(f"/keys/{made['key_id']}")).raise_for_status()
    assert (await admin.post("/keys", json={"role": "member"})).status_code == 400
    clock.move(days=1)
    assert (await admin.post("/keys", json={"role": "member"})).status_code == 201
    async with service.database.read() as session:
        assert await session.get(ApiKey, made["key_id"]) is None
    assert len((await admin.get("/keys")).json()["keys"]) == 3
    # Another tenant's ended keys make no room.
    assert kept["key_id"] in {one["key_id"] for one in (await theirs.get("/keys")).json()["keys"]}


async def test_a_tenant_has_a_bounded_number_of_projects(
    admin: httpx.AsyncClient, theirs: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projects, "MOST_PROJECTS", 2)
    answers = [await admin.post("/projects", json={"name": name}) for name in ("one", "two", "three", "one")]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200]
    assert (await theirs.post("/projects", json={"name": "three"})).status_code == 200


async def test_tests_of_a_webhook_stop_while_too_many_events_wait(
    admin: httpx.AsyncClient, theirs: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "MOST_WAITING", 2)
    for client in (admin, theirs):
        (await client.put("/webhooks/mine", json={"url": "https://example.org/"})).raise_for_status()
    answers = [await admin.post("/webhooks/mine/test") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert (await theirs.post("/webhooks/mine/test")).status_code == 200
