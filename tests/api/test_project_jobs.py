"""Jobs on weights are in the project of the run that they make or add to; keys of other projects and tenants see none of them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from sqlalchemy import select

from store.clock import utc_now
from store.tables import Session, WeightJob
from tenants.project_limits import set_project_limits
from tenants.projects import create_project
from tenants.rights import KeyRights, Role
from tenants.weight_jobs import IMPORTS
from tests.api.worlds import World, opened_world

IMPORT = {"base_model": "test/tiny", "name": "mine"}
JOBS = "/api/weft/v1/jobs"


@pytest_asyncio.fixture
async def world(service, cats, dogs) -> AsyncIterator[World]:
    async with opened_world(service, cats, dogs) as made:
        yield made


async def client(world: World, *projects: str) -> httpx.AsyncClient:
    """A key for projects, or for the whole tenant."""
    return await world.client(KeyRights(role=Role.ADMIN, projects=frozenset(projects) or None))


async def imported(http: httpx.AsyncClient, key: str | None = None, **wanted: str) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return await http.post("/api/weft/v1/imports", params=IMPORT | wanted, content=b"archive", headers=headers)


async def ids(http: httpx.AsyncClient) -> set[str]:
    return {job["id"] for job in (await http.get(JOBS)).raise_for_status().json()["jobs"]}


async def project_of(world: World, job: str) -> str | None:
    of_job = select(Session.project).join(WeightJob, WeightJob.session_id == Session.id).where(WeightJob.id == job)
    async with world.service.database.read() as session:
        return await session.scalar(of_job)


async def test_a_key_of_a_project_imports_into_it_and_no_other_key_of_a_project_sees_that(
    world: World, dogs: Any
) -> None:
    async with world.service.database.write() as transaction:
        second = (await create_project(transaction, world.tenant.id, "second", world.service.clock)).id
    archivist, other = await client(world, world.project), await client(world, second)
    default, whole = await client(world, world.tenant.id), await client(world)
    job = (await imported(archivist)).raise_for_status().json()["id"]
    elsewhere = (await imported(default)).raise_for_status().json()["id"]
    assert [await project_of(world, one) for one in (job, elsewhere)] == [world.project, None]
    assert [await ids(one) for one in (archivist, other, default, whole)] == [
        {job},
        set(),
        {elsewhere},
        {job, elsewhere},
    ]
    for http in (other, default, dogs.http):
        for answer in (http.get(f"{dogs.service.url}{JOBS}/{job}"), http.delete(f"{dogs.service.url}{JOBS}/{job}")):
            assert (await answer).status_code == 404
    assert (await archivist.delete(f"{JOBS}/{job}")).json()["state"] == "cancelled"


async def test_an_import_names_its_project_as_a_session_does(world: World, dogs: Any) -> None:
    whole, archivist = await client(world), await client(world, world.project)
    job = (await imported(whole, project_id="archive")).raise_for_status().json()["id"]
    assert await project_of(world, job) == world.project
    for http, named in ((archivist, "default"), (whole, "none-such")):
        refused = await imported(http, project_id=named)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    address = f"{dogs.service.url}/api/weft/v1/imports"
    theirs = await dogs.http.post(address, params={**IMPORT, "project_id": world.project}, content=b"archive")
    assert theirs.status_code == 403
    assert len(list(world.service.services.runtime.data_folder.path(IMPORTS).iterdir())) == 1


async def test_a_merge_is_in_its_checkpoints_project_and_moves_with_it(world: World) -> None:
    archivist, default = await client(world, world.project), await client(world, world.tenant.id)
    path = f"tinker://{world.other_project['run']}/weights/one"
    asked = {"path": path, "name": "merged"}
    assert (await default.post("/api/weft/v1/merges", json=asked)).status_code == 404
    job = (await archivist.post("/api/weft/v1/merges", json=asked)).raise_for_status().json()["id"]
    assert (await ids(archivist), await ids(default)) == ({job}, set())
    moved = f"/api/v1/sessions/{world.other_project['session']}/project"
    (await (await client(world)).put(moved, json={"project_id": "default"})).raise_for_status()
    assert (await ids(archivist), await ids(default)) == (set(), {job})


async def test_a_key_under_which_another_project_has_a_job_tells_nothing_of_it(world: World) -> None:
    archivist, default = await client(world, world.project), await client(world, world.tenant.id)
    job = (await imported(archivist, "one")).raise_for_status().json()["id"]
    assert (await imported(archivist, "one")).json()["id"] == job
    merge = {"path": f"tinker://{world.own['run']}/weights/one", "name": "merged"}
    once = {"Idempotency-Key": "one"}
    for answer in (await imported(default, "one"), await default.post("/api/weft/v1/merges", json=merge, headers=once)):
        assert (answer.status_code, answer.json()["code"]) == (400, "sequence_conflict")
        assert job not in answer.text
    assert (await imported(default, "two")).status_code == 202


@pytest.mark.parametrize(
    ("limits", "says"),
    [({"checkpoints": 2}, "3 of 2 checkpoints"), ({"stored_bytes": 20}, "room for an archive of 6 bytes")],
)
async def test_an_archive_beyond_its_projects_storage_is_refused_and_another_projects_is_not(
    world: World, limits: dict[str, int], says: str
) -> None:
    """The project's run has two checkpoints already."""
    archivist, default = await client(world, world.project), await client(world, world.tenant.id)
    async with world.service.database.write() as transaction:
        await set_project_limits(transaction, world.tenant.id, world.project, limits, utc_now)
    refused = await imported(archivist)
    assert (refused.status_code, refused.json()["code"]) == (400, "storage_full"), refused.text
    assert says in refused.text
    assert not list(world.service.services.runtime.data_folder.path(IMPORTS).glob("*"))
    assert (await imported(default)).status_code == 202
