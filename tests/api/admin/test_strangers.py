"""Strangers at the admin listener take turns on the loop and the database as at the tenants' API."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest

from api.admin.services import OPERATORS
from api.dashboard.operators.rendering import OPS
from api.presented_session import OPERATOR_COOKIE
from store.fair_places import OWN_WORK, STRANGERS, FairPlaces, Owner, asking
from tenants.key_text import key_text, new_prefix
from tests.api.admin.conftest import Admin
from tests.api.conftest import Tenant

FLOOD, ASKED = 24, 15


@pytest.fixture
def owners(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> list[Owner]:
    """Owners of the reads of operators' keys and of what their requests write."""
    found: list[Owner] = []
    database = admin.service.database

    def noted(opened: Callable[[], AbstractAsyncContextManager[object]]) -> Callable[[], object]:
        @asynccontextmanager
        async def noting() -> AsyncIterator[object]:
            found.append(asking())
            async with opened() as session:
                yield session

        return noting

    for way in ("read", "survey", "write"):
        monkeypatch.setattr(database, way, noted(getattr(database, way)))
    assert isinstance(database.places, FairPlaces)
    return found


def wrong_key() -> str:
    return key_text(new_prefix(), bytes(32))


async def test_wrong_operator_keys_read_the_database_as_strangers(admin: Admin, owners: list[Owner]) -> None:
    async with httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        owners.clear()
        assert (await http.get("/admin/v1/tenants", headers={"X-API-Key": wrong_key()})).status_code == 401
        assert (await http.get(f"{OPS}/overview", headers={"cookie": f"{OPERATOR_COOKIE}={'x' * 43}"})).status_code in (
            303,
            401,
        )
        form = {"key": wrong_key()}
        same = {"sec-fetch-site": "same-origin"}
        assert (await http.post(f"{OPS}/login", data=form, headers=same)).status_code == 401
    assert len(owners) >= 3
    assert set(owners) == {STRANGERS}


async def test_an_operator_is_a_stranger_until_the_key_is_known(admin: Admin, owners: list[Owner]) -> None:
    owners.clear()
    assert (await admin.http.get("/tenants")).status_code == 200
    assert (owners[0], owners[-1]) == (STRANGERS, OWN_WORK)
    # No read after the key is known is a stranger's.
    assert STRANGERS not in owners[owners.index(OWN_WORK) :]


async def test_a_flood_of_wrong_operator_keys_leaves_the_loop_to_tenants_and_operators(
    admin: Admin, dogs: Tenant
) -> None:
    session, refused = await dogs.session(), 0
    loop_time = admin.service.services.admission.loop_time

    async def flood(http: httpx.AsyncClient) -> None:
        nonlocal refused
        while True:
            answer = await http.get("/admin/v1/tenants", headers={"X-API-Key": wrong_key()})
            refused += answer.status_code == 401

    async with asyncio.timeout(120), httpx.AsyncClient(base_url=admin.url, timeout=40) as http:
        flooding = [asyncio.create_task(flood(http)) for _ in range(FLOOD)]
        for _ in range(ASKED):
            beat = await dogs.http.post("/session_heartbeat", json={"session_id": session})
            assert beat.status_code == (await admin.http.get("/tenants")).status_code == 200
        used = {name: sender.rate.value for name, sender in loop_time._senders.items()}
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    assert {f"tenant {dogs.id}", f"tenant {OPERATORS}", "address 127.0.0.1"} <= set(used), (
        "one account for both listeners"
    )
    # Taken as they come, FLOOD of them are answered between any two of the others.
    assert 0 < refused < ASKED * FLOOD
