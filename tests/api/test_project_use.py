"""Use of projects' limits is counted from pending rows of their tenants, in few statements."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from sqlalchemy import event

from store.database import Database
from tenants.project_limits import uses_of_samplers, uses_of_sessions
from tests.api.conftest import Tenant
from tests.api.test_project_limits import project, sample, sampler_in, session_in


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    """Note the statements that are sent, with their values."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        sent.append((statement, values))

    engine = database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


async def test_a_projects_pending_samples_are_counted_by_the_index_of_its_tenants_pending_rows(
    cats: Tenant, dogs: Tenant
) -> None:
    await project(cats, "small", pending_samples=5)
    lane = await sampler_in(cats, "small")
    (await sample(cats, lane, 1)).raise_for_status()
    (await sample(dogs, await sampler_in(dogs), 1)).raise_for_status()
    database = cats.service.database
    async with database.read() as session:
        with statements(database) as sent:
            uses = await uses_of_samplers(session, [lane])
        assert uses[lane].used == {"pending_samples": 1}
        counting = sent[-1]
    url = database.engine.url
    if url.get_backend_name() == "sqlite":
        with closing(sqlite3.connect(str(url.database))) as connection:
            plan = connection.execute("EXPLAIN QUERY PLAN " + counting[0], counting[1]).fetchall()
        steps = [str(step[3]) for step in plan if "operations" in str(step[3])]
        assert steps, plan
        assert all("tenant_id=?" in step for step in steps), plan
    assert "operations.tenant_id =" in counting[0]


async def test_uses_of_many_sessions_cost_one_statement_and_one_for_each_limited_project(
    cats: Tenant, dogs: Tenant
) -> None:
    await project(cats, "small", open_runs=1)
    sessions = [await session_in(cats, "small") for _ in range(5)] + [await session_in(cats), await session_in(dogs)]
    database = cats.service.database
    async with database.read() as session:
        with statements(database) as sent:
            uses = await uses_of_sessions(session, sessions, ["open_runs"])
    assert sorted(uses) == sorted(sessions[:5])
    assert len([one for one in sent if one[0].lstrip().startswith(("SELECT", "WITH"))]) == 2
