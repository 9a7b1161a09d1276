"""Lists and searches of a tenant that keeps very many sessions: nobody else waits for one of them."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from shutil import copyfile

import pytest_asyncio
from sqlalchemy import bindparam, text

from bench.ledger.plans import recorded
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables.base import UtcDateTime
from tenants.session_search import PIECE, SEARCHED, SessionQuery, search_sessions
from tenants.sessions import NewSession, create_session, list_lost_sessions, list_sessions
from tenants.tenant_names import create_tenant
from tests.tenants.loop_turns import neighbour

NEW = NewSession([], {"a": "1", "b": "2"}, "x", None, None)
SESSIONS = SEARCHED + 2 * PIECE
_SESSIONS = text(
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :sessions) "
    "INSERT INTO sessions (id, tenant_id, tags, user_metadata, sdk_version, created_at, last_seen_at) "
    "SELECT 's' || i, :tenant, '[]', '{\"a\": \"1\"}', 'x', :now, :now FROM n"
).bindparams(bindparam("now", type_=UtcDateTime()))


@pytest_asyncio.fixture
async def database(migrated_database: Path, tmp_path: Path) -> AsyncIterator[Database]:
    """A database of the test's own."""
    path = copyfile(migrated_database, tmp_path / "weft.db")
    opened = Database(create_engine(f"sqlite+aiosqlite:///{path}"))
    yield opened
    await opened.close()


async def test_a_search_of_very_many_sessions_gives_others_their_turn(database: Database) -> None:
    """SQLite's statements run on the event loop: a search is many short ones, and ends before it has looked at everything."""
    async with database.write() as transaction:
        flood, light = [await create_tenant(transaction, name=name, clock=utc_now) for name in ("flood", "light")]
        await transaction.execute(
            _SESSIONS, {"tenant": flood, "sessions": SESSIONS, "now": utc_now() + timedelta(hours=1)}
        )
        oldest = await create_session(transaction, flood, NEW, utc_now)
        theirs = await create_session(transaction, light, NEW, utc_now)
    query = SessionQuery(None, None, {"a": "1", "b": "2"}, None, None, None, 50)
    async with neighbour() as beside, database.read() as session:
        before = beside.turns
        found, end = await search_sessions(session, flood, query)
        assert (found, end is None) == ([], False)
        assert beside.turns - before >= SEARCHED // PIECE - 1
        pages = 1
        while end is not None:
            query = SessionQuery(None, None, {"a": "1", "b": "2"}, None, None, end, 50)
            more, end = await search_sessions(session, flood, query)
            found += more
            pages += 1
        assert ([one.row.id for one in found], pages) == ([oldest], 2)
        named, _ = await search_sessions(session, flood, SessionQuery("s7", None, {}, None, None, None, 50))
        assert [one.row.id for one in named] == ["s7"]
        beside_found, _ = await search_sessions(session, light, SessionQuery(None, None, {}, None, None, None, 50))
        assert [one.row.id for one in beside_found] == [theirs]


async def test_a_deep_page_of_sessions_and_the_lost_ones_are_read_from_an_index_alone(
    database: Database, tmp_path: Path
) -> None:
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="deep", clock=utc_now)
    async with database.read() as session:
        with recorded(database.engine, "lists") as statements:
            await list_sessions(session, tenant, limit=1000, offset=90_000)
            await list_lost_sessions(session, tenant, most=50)
    with closing(sqlite3.connect(tmp_path / "weft.db")) as connection:
        plans = [
            str(connection.execute(f"EXPLAIN QUERY PLAN {one.text}", one.parameters).fetchall()) for one in statements
        ]
    assert "USING COVERING INDEX ix_sessions_listed" in plans[0]
    assert "USING INDEX ix_sessions_lost" in plans[1]
