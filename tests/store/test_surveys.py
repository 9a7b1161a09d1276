"""Surveys run beside the event loop on SQLite, in their tenants' turns, and end with whoever asked for them."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio
from sqlalchemy import insert, select, text
from sqlalchemy.exc import OperationalError

from contracts.errors import Unavailable
from store.clock import utc_now
from store.database import Database, create_engine
from store.fair_places import OWN_WORK, Owner, ask_for
from store.statement_limit import statements_within
from store.tables import Tenant

ENDLESS = text("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n")
FAR_BELOW = 20.0
"""Seconds, less than the longest time of a statement."""


@pytest_asyncio.fixture
async def database(migrated_database: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """A database of SQLite."""
    shutil.copy(migrated_database, tmp_path / "weft.db")
    opened = Database(create_engine(f"sqlite:///{tmp_path}/weft.db"))
    yield opened
    await opened.close()


async def endless(database: Database, tenant: Owner, begun: asyncio.Event) -> None:
    """Survey for ever, as the tenant."""
    ask_for(tenant)
    async with database.survey() as session:
        begun.set()
        await session.execute(ENDLESS)


async def count(database: Database, tenant: str) -> int:
    """Count the tenants, as a tenant."""
    ask_for(tenant)
    async with database.survey() as session:
        return len(list(await session.scalars(select(Tenant))))


async def test_the_loop_goes_on_and_others_survey_and_write_while_one_tenant_does_for_long(database) -> None:
    begun = asyncio.Event()
    long = asyncio.create_task(endless(database, "cats", begun))
    second = asyncio.create_task(count(database, "cats"))
    async with asyncio.timeout(FAR_BELOW):
        await begun.wait()
        assert await count(database, "dogs") == 0
        async with database.write() as transaction:
            await transaction.execute(insert(Tenant).values(id="d", name="dogs", created_at=utc_now()))
        assert await count(database, "dogs") == 1
        assert not second.done(), "a tenant's second survey waits for its first"
        long.cancel()
        # Cancelled, its statement has ended: the same tenant's next one has its place.
        assert await second == 1
        with pytest.raises(asyncio.CancelledError):
            await long


@pytest.mark.parametrize("turns", [None, 0, 1, 2, 3, 5, 8, 50])
async def test_a_survey_that_is_cancelled_again_and_again_gives_its_place_back(database, turns: int | None) -> None:
    """A stream whose client leaves is cancelled at each turn of the loop: while it connects, or from a turn after that on."""
    begun = asyncio.Event()
    long = asyncio.create_task(endless(database, "cats", begun))
    if turns is None:
        await asyncio.sleep(0)
    else:
        await asyncio.wait_for(begun.wait(), FAR_BELOW)
    for _ in range(turns or 0):
        await asyncio.sleep(0)
    async with asyncio.timeout(FAR_BELOW):
        while not long.done():
            long.cancel()
            await asyncio.sleep(0)
        assert long.cancelled()
        assert await count(database, "cats") == await count(database, "dogs") == 0


async def test_the_services_own_surveys_leave_tenants_a_place(database) -> None:
    own = [asyncio.create_task(endless(database, OWN_WORK, asyncio.Event())) for _ in range(3)]
    async with asyncio.timeout(FAR_BELOW):
        assert await count(database, "cats") == 0
        assert await count(database, "dogs") == 0
    for task in own:
        task.cancel()
    await asyncio.gather(*own, return_exceptions=True)


async def test_a_survey_ends_at_its_callers_limit_and_the_next_one_runs(database) -> None:
    began = monotonic()
    with statements_within(0.2), pytest.raises(Unavailable, match=r"longer than 0\.2 s"):
        await endless(database, "cats", asyncio.Event())
    assert await count(database, "cats") == 0
    assert monotonic() - began < FAR_BELOW


async def test_a_loop_that_stands_still_takes_no_time_from_a_survey(database) -> None:
    """Writes wait on the loop for another process that writes, for longer than a page's statement may take."""
    async with AsyncExitStack() as stack:
        with statements_within(1.0):
            session = await stack.enter_async_context(database.survey())
        asked = asyncio.create_task(session.scalar(text("SELECT 7")))
        while not asked.done():
            await asyncio.sleep(0)
            threading.Event().wait(1.1)
        assert asked.result() == 7


async def test_a_survey_sees_what_was_committed_between_its_statements_and_changes_nothing(database) -> None:
    async with database.survey() as session:
        assert await session.scalar(select(Tenant.name)) is None
        async with database.write() as transaction:
            await transaction.execute(insert(Tenant).values(id="d", name="dogs", created_at=utc_now()))
        assert await session.scalar(select(Tenant.name)) == "dogs"
        with pytest.raises(OperationalError, match="readonly"):
            await session.execute(text("DELETE FROM tenants"))


async def test_a_survey_of_postgresql_is_a_read(migrated_postgres_url: str) -> None:
    database = Database(create_engine(migrated_postgres_url))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        first, second = [await stack.enter_async_context(database.survey()) for _ in range(2)]
        assert [await one.scalar(text("SELECT 7")) for one in (first, second)] == [7, 7]


async def test_a_tenant_is_charged_with_the_time_of_its_surveys(database) -> None:
    charged: dict[str, float] = {}
    database.surveys.charge = lambda tenant, seconds: charged.update({tenant: charged.get(tenant, 0.0) + seconds})
    with statements_within(0.2), pytest.raises(Unavailable):
        await endless(database, "cats", asyncio.Event())
    await count(database, "dogs")
    assert charged["cats"] > 0.15
    assert 0 < charged["dogs"] < charged["cats"]
