"""The page on backups names each folder without which a restored service loses something."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cli.doctor import examine
from store.clock import utc_now
from store.database import Database, create_engine
from store.settings import Settings
from tenants.tenant_names import create_tenant
from tests.conftest import ROOT
from workers.housekeeping.retention import RETENTION_OF_FOLDERS, Ends

PAGE = ROOT / "docs" / "how-to" / "back-up-and-restore.md"
MADE_ANEW = {"in-hand"}
"""Folders that end with their process."""


def test_a_backup_takes_every_folder_that_rows_name() -> None:
    page = PAGE.read_text()
    copies = [line for line in page.splitlines() if line.startswith("rsync ")]
    named = [name for name, end in RETENTION_OF_FOLDERS.items() if isinstance(end, Ends) and name not in MADE_ANEW]
    assert (len(copies), "cp -a backup/*/ restored/" in page, "payloads" in named) == (2, True, True)
    for name in named:
        assert all(f"data/{name} " in line for line in copies), name
        assert f"`{name}/`" in page, name


async def _make_tenants(database: Database, *names: str) -> None:
    async with database.write() as transaction:
        for name in names:
            await create_tenant(transaction, name=name, clock=utc_now)


async def test_a_dump_of_sqlite_by_the_pages_command_has_all_that_is_committed_and_opens(
    migrated_database: Path, tmp_path: Path
) -> None:
    """While a service writes: its newest commits are in SQLite's log alone, and another transaction is under way."""
    (found,) = re.findall(r'^sqlite3 data/weft.db "(.*)"', PAGE.read_text(), re.MULTILINE)
    live, dump = tmp_path / "weft.db", tmp_path / "restored" / "weft.db"
    dump.parent.mkdir()
    shutil.copy(migrated_database, live)
    database = Database(create_engine(f"sqlite+aiosqlite:///{live}"))
    await _make_tenants(database, "cats", "dogs")
    async with database.write() as transaction:
        await create_tenant(transaction, name="not committed", clock=utc_now)
        with closing(sqlite3.connect(live)) as connection:
            connection.execute(found.replace("backup/weft.db", str(dump)))
    await database.close()
    with closing(sqlite3.connect(dump)) as connection:
        assert connection.execute("SELECT name FROM tenants ORDER BY name").fetchall() == [("cats",), ("dogs",)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    restored = Database(create_engine(f"sqlite+aiosqlite:///{dump}"))
    await _make_tenants(restored, "birds")
    await restored.close()


def test_a_restored_sqlite_database_is_well_by_the_doctor(
    migrated_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_DATABASE_URL", raising=False)
    with closing(sqlite3.connect(migrated_database)) as connection:
        connection.execute(f"VACUUM INTO '{tmp_path / 'weft.db'}'")
    findings = {one.part: one for one in examine(Settings(data_dir=tmp_path))}
    assert (findings["data folder"].is_well, findings["database"].is_well) == (True, True)


def test_a_drill_sends_no_webhooks() -> None:
    _, _, restore = PAGE.read_text().partition("## Restore")
    assert restore.index("export WEFT_SEND_WEBHOOKS=false") < restore.index("weft up")
    assert Settings.model_validate({"send_webhooks": "false"}).send_webhooks is False
