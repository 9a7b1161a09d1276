"""Uses of all projects of a tenant are counted together, and as each is counted where its limits are enforced."""

import pytest
from sqlalchemy import event, update

from store.settings import Settings
from store.tables import Run, Session
from tenants.project_limits import COUNTED, use_of_project
from tenants.project_uses import uses_of_tenant
from tests.api.conftest import Tenant
from tests.api.test_project_limits import project, sample, sampler_in, session_in

PROJECTS = 20
MOST_STATEMENTS = 10


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Settings of either database."""
    if request.param == "sqlite":
        return settings
    return settings.model_copy(update={"database_url": request.getfixturevalue("migrated_postgres_url")})


async def used(tenant: Tenant, own: str | None) -> None:
    """Use some of each limit in a session of the project."""
    run = await tenant.run(session=await session_in(tenant, own))
    for name in ("one", "two"):
        await tenant.checkpoint(run, name)
    await tenant.operation(run)
    assert (await sample(tenant, await sampler_in(tenant, own), 0)).status_code == 200
    async with tenant.service.database.write() as transaction:
        kept = update(Run).where(Run.id == run).values(snapshot_dir=run, snapshot_bytes=5)
        await transaction.execute(kept)


async def test_all_projects_are_counted_by_few_statements_as_each_is_where_its_limits_are_enforced(
    cats: Tenant, dogs: Tenant
) -> None:
    """Sessions that have ended, other projects and other tenants count to none."""
    service, bounds = cats.service, dict.fromkeys(COUNTED, 9)
    own = [await project(cats, f"project-{number}", **bounds) for number in range(PROJECTS)]
    theirs, ended = await project(dogs, "project-0", **bounds), await session_in(cats, "project-0")
    for tenant, name in ((cats, "project-0"), (cats, "project-7"), (dogs, "project-0"), (cats, None)):
        await used(tenant, name)
    async with service.database.write() as transaction:
        await transaction.execute(update(Session).where(Session.id == ended).values(ended_at=service.clock()))
    sent: list[str] = []
    async with service.database.read() as session:
        enforced = [await use_of_project(session, cats.id, one, COUNTED) for one in sorted(own)]
        event.listen(service.database.engine.sync_engine, "before_cursor_execute", lambda *told: sent.append(told[2]))
        assert await uses_of_tenant(session, cats.id) == enforced
        assert len(sent) < MOST_STATEMENTS
        (beside,) = await uses_of_tenant(session, dogs.id)
        assert beside == await use_of_project(session, dogs.id, theirs, COUNTED)
    assert set(beside.used) == set(COUNTED)
    assert all(beside.used.values())
