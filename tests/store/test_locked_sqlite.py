"""A SQLite database that another process has locked holds the event loop for one wait, not for one of each task that writes."""

import asyncio
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from time import monotonic

from sqlalchemy import select

from contracts.errors import Unavailable
from store.database import Database, create_engine
from store.tables import Tenant
from store.transaction import SQLITE_BUSY_SECONDS

TASKS = 20


async def test_tasks_that_write_wait_once_for_a_lock_that_stays(migrated_database: Path, tmp_path: Path) -> None:
    path = tmp_path / "weft.db"
    shutil.copy(migrated_database, path)
    database = Database(create_engine(f"sqlite+aiosqlite:///{path}"))

    async def write() -> None:
        async with database.write() as transaction:
            await transaction.scalar(select(Tenant.name))

    await write()
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = monotonic()
        found = await asyncio.gather(*(write() for _ in range(TASKS)), return_exceptions=True)
        assert all(isinstance(one, Unavailable) for one in found), found
        assert monotonic() - began < 3 * SQLITE_BUSY_SECONDS, "each task waited for itself"
        async with database.read() as session:
            assert await session.scalar(select(Tenant.name)) is None
        other.execute("ROLLBACK")
        await write()
        # A lock that goes is waited for again.
        other.execute("BEGIN EXCLUSIVE")
        release = threading.Timer(0.5, lambda: other.execute("ROLLBACK"))
        release.start()
        await write()
        release.join()
    await database.close()
