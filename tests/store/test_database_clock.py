"""Every process of a cluster tells the database's time, whatever its host's clock says."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from store import database_clock
from store.database import Database, create_engine
from store.database_clock import DatabaseClock, clock_of


async def test_a_host_whose_clock_is_an_hour_off_ends_nothing_early(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_clock, "utc_now", lambda: datetime.now(UTC) + timedelta(hours=1))
    wrong = DatabaseClock()
    assert wrong() - datetime.now(UTC) > timedelta(minutes=59)
    database = Database(create_engine(postgres_url))
    try:
        one, other = await clock_of(database), await clock_of(database)
    finally:
        await database.close()
    # The test's database is on this host.
    assert abs(one() - datetime.now(UTC)) < timedelta(seconds=5)
    assert abs(one() - other()) < timedelta(seconds=5)


async def test_with_sqlite_it_is_the_hosts_time(tmp_path: Path) -> None:
    database = Database(create_engine(f"sqlite+aiosqlite:///{tmp_path}/weft.db"))
    clock = await clock_of(database)
    assert abs(clock() - datetime.now(UTC)) < timedelta(seconds=5)
    await database.close()
