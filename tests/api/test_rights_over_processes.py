"""A change of a key's rights, or of its tenant, holds from the next request on of every API process."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import update

from store.settings import Settings
from store.tables import ApiKey
from store.tables import Tenant as Row
from tenants.keys import create_key
from tenants.rights import KeyRights, Role
from tests.api.conftest import MovableClock, Service, Tenant, serving_api


@dataclass(frozen=True)
class Change:
    """A change of the key's row or its tenant's, a request that it forbids, and the answer to it from then on."""

    path: str
    status: int
    of_key: dict[str, Any] | None = None
    of_tenant: dict[str, Any] | None = None


CHANGES = {
    "role": Change("/api/weft/v1/keys", 403, of_key={"role": "member"}),
    "scopes": Change("/api/v1/training_runs", 403, of_key={"scopes": ["train"]}),
    "projects": Change("/api/v1/training_runs/{run}", 404, of_key={"projects": ["proj-other"]}),
    "networks": Change("/api/v1/training_runs", 403, of_key={"networks": ["10.0.0.0/8"]}),
    "expiry": Change("/api/v1/training_runs", 401, of_key={"expires_at": "past"}),
    "suspension": Change("/api/v1/training_runs", 403, of_tenant={"suspended_at": "past", "suspend_mode": "blocked"}),
}


@pytest_asyncio.fixture
async def beside(
    service: Service, settings: Settings, clock: MovableClock, base_model: Path
) -> AsyncIterator[tuple[Service, Service]]:
    """Two API processes over one database."""
    async with serving_api(settings, clock, base_model) as second:
        yield service, second


async def status(api: Service, secret: str, path: str) -> int:
    async with httpx.AsyncClient(base_url=api.url, headers={"X-API-Key": secret}, timeout=40) as http:
        return (await http.get(path)).status_code


@pytest.mark.parametrize("way", ["key", "token"])
@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_of_rights_holds_on_both_of_two_processes_at_once_and_so_does_its_end(
    beside: tuple[Service, Service], cats: Tenant, dogs: Tenant, name: str, way: str
) -> None:
    """Both processes have answered the key before, and are told of no change. A second tenant's key works all the while."""
    first, change = beside[0], CHANGES[name]
    path, now = change.path.format(run=await cats.run()), first.clock()
    async with first.database.write() as transaction:
        key = await create_key(transaction, tenant=cats.id, note="", clock=first.clock, rights=KeyRights(Role.ADMIN))
    secret = key.secret
    if way == "token":
        exchanged = await cats.http.post("/auth/token", json={}, headers={"X-API-Key": secret})
        secret = exchanged.raise_for_status().json()["jwt"]

    async def ask(expected: int) -> None:
        for api in beside:
            assert await status(api, secret, path) == expected, (api is first, name)
            assert await status(api, dogs.key, "/api/v1/training_runs") == 200

    async def put(value_of: Callable[[str, Any], Any]) -> None:
        async with first.database.write() as transaction:
            for row, id, values in ((ApiKey, key.id, change.of_key), (Row, cats.id, change.of_tenant)):
                if values:
                    given = {column: value_of(column, value) for column, value in values.items()}
                    await transaction.execute(update(row).where(row.id == id).values(given))

    for _ in range(2):
        await ask(200)
    await put(lambda _, value: now - timedelta(seconds=1) if value == "past" else value)
    await ask(change.status)
    await put(lambda column, _: Role.ADMIN if column == "role" else None)
    await ask(200)
