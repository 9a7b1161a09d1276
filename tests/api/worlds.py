"""A tenant with rows that every kind of request can name, beside another tenant."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from sqlalchemy import func, select

from contracts.paths import Segment
from store.tables import Base
from tenants.keys import create_key
from tenants.projects import create_project
from tenants.rights import KeyRights
from tenants.samplers import NewSampler, create_sampler
from tests.api.rights_matrix import Call, filled


@dataclass
class World:
    """A tenant with a project, rows in the default project and in that one, and another tenant with rows of its own."""

    service: Any
    tenant: Any
    project: str
    own: dict[str, str]
    other_project: dict[str, str]
    other_tenant: dict[str, str]
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def client(self, rights: KeyRights) -> httpx.AsyncClient:
        async with self.service.database.write() as transaction:
            key = await create_key(transaction, tenant=self.tenant.id, note="", clock=self.service.clock, rights=rights)
        http = httpx.AsyncClient(base_url=self.service.url, headers={"X-API-Key": key.secret}, timeout=40)
        self.clients.append(http)
        return http

    async def counts(self) -> dict[str, int]:
        async with self.service.database.read() as session:
            tables = Base.metadata.sorted_tables
            return {one.name: await session.scalar(select(func.count()).select_from(one)) or 0 for one in tables}


async def _rows(tenant, project: str | None) -> dict[str, str]:
    """Make one row of each kind that a request can name, in a project; return their ids."""
    given = {} if project is None else {"project_id": project}
    session = (await tenant.http.post("/create_session", json=given)).raise_for_status().json()["session_id"]
    run = await tenant.run(session=session)
    await tenant.checkpoint(run, "one")
    await tenant.checkpoint(run, "two", segment=Segment.SAMPLER_WEIGHTS)
    async with tenant.service.database.write() as transaction:
        new = NewSampler(session, 0, "test/tiny")
        sampler = await create_sampler(transaction, tenant.id, new, tenant.service.clock)
    request = await tenant.operation(run, 1)
    return {"session": session, "run": run, "sampler": sampler, "request": request, "project": project or tenant.id}


@asynccontextmanager
async def opened_world(service, cats, dogs) -> AsyncIterator[World]:
    """Two tenants with rows; the first has some in a project, too."""
    async with service.database.write() as transaction:
        project = (await create_project(transaction, cats.id, "archive", service.clock)).id
    own, archived = await _rows(cats, None), await _rows(cats, project)
    made = World(service, cats, project, own, archived, await _rows(dogs, None))
    yield made
    for http in made.clients:
        await http.aclose()


async def send(http: httpx.AsyncClient, call: Call, ids: dict[str, str], number: int) -> httpx.Response:
    """Send the call with the ids filled in."""
    # A number of its own for each key: what was accepted for one key is no repeat for another.
    body = filled(call.body, ids)
    for name in ("seq_id", "model_seq_id", "sampling_session_seq_id"):
        if body is not None and name in body:
            body[name] += 100 * number if name != "seq_id" or body[name] >= 900 else number * 10
    return await http.request(call.method, filled(call.path, ids), json=body, follow_redirects=False)
