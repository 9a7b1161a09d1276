"""Searches of sessions find the same on SQLite and on PostgreSQL, and only those of one's own tenant."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from contracts.ids import SessionId, TenantId
from store.clock import utc_now
from store.database import Database, create_engine
from tenants.session_search import SessionQuery, search_sessions
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant

METADATA = {"yes": True, "no": False, "one": 1, "half": 0.5, "word": "true"}
NEW = NewSession([], METADATA, "x", None, "ÄPFEL lauf")


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Either database."""
    opened = Database(create_engine(database_url))
    yield opened
    await opened.close()


async def found(database: Database, tenant: TenantId, *, name: str | None = None, **sought: str) -> list[SessionId]:
    async with database.read() as session:
        rows, _ = await search_sessions(session, tenant, SessionQuery(None, name, sought, None, None, None, 50))
    return [SessionId(one.row.id) for one in rows]


@pytest.mark.parametrize(
    ("sought", "is_found"),
    [
        ({"yes": "true"}, True),
        ({"yes": "1"}, False),
        ({"no": "false"}, True),
        ({"no": "0"}, False),
        ({"one": "1", "half": "0.5", "word": "true"}, True),
        ({"name": "äpfel LAUF"}, True),
        ({"name": "apfel"}, False),
    ],
)
async def test_a_search_finds_what_the_api_shows_whichever_the_database(
    database: Database, sought: dict[str, str], is_found: bool
) -> None:
    async with database.write() as transaction:
        cats, dogs = [await create_tenant(transaction, name=name, clock=utc_now) for name in ("cats", "dogs")]
        mine, theirs = [await create_session(transaction, one, NEW, utc_now) for one in (cats, dogs)]
    assert await found(database, cats, **sought) == [mine] * is_found
    assert await found(database, dogs, **sought) == [theirs] * is_found
