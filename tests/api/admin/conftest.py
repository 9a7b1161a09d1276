"""The admin API over the database of the tenants' API, served by the listener's own code on a free port."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest_asyncio

from cli.admin_listener import serve_admin
from tenants.operator_keys import NewOperatorKey, create_operator_key
from tests.api.conftest import Service


@dataclass
class Admin:
    """The running admin API, an operator's key, and a client that sends it."""

    service: Service
    url: str
    key: NewOperatorKey
    http: httpx.AsyncClient

    @property
    def data(self) -> Path:
        return self.service.services.runtime.settings.data_dir


@pytest_asyncio.fixture
async def admin(service: Service) -> AsyncIterator[Admin]:
    settings = service.services.runtime.settings.model_copy(update={"admin_port": 0})
    runtime = replace(service.services.runtime, settings=settings)
    async with service.database.write() as transaction:
        key = await create_operator_key(transaction, note="tests", expires_at=None, clock=service.clock)
    async with serve_admin(runtime, service.services.admission.loop_time) as url:
        assert url is not None
        headers = {"X-API-Key": key.secret}
        async with httpx.AsyncClient(base_url=f"{url}/admin/v1", headers=headers, timeout=40) as http:
            yield Admin(service, url, key, http)
