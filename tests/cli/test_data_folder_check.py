"""A process does not start on the bare place where its data folder's disk is to be mounted."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.data_folder_check import check_data_folder
from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.operations import LoraSettings
from contracts.paths import Segment
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.runs import NewRun
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run
from tests.conftest import ROOT


@pytest_asyncio.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(create_engine(database_url))
    yield opened
    await opened.close()


async def record(database: Database) -> None:
    """Record a tenant's checkpoint."""
    async with database.write() as transaction:
        tenant: TenantId = await create_tenant(transaction, name="cats", clock=utc_now)
        session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        run = await create_run(transaction, tenant, NewRun(session, 0, "base", LoraSettings(4, seed=1), None), utc_now)
        new = NewCheckpoint(new_checkpoint_id(), run, Segment.WEIGHTS, "one", 1, None, True, None)
        await record_checkpoint(transaction, tenant, new, utc_now)


async def served(data: Path, model: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start the service on the folder, and wait for its end."""
    command = [sys.executable, "-m", "cli.main", "serve", "--port", "0", "--data", str(data)]
    return await asyncio.to_thread(
        subprocess.run,
        [*command, "--base-model", f"weft/tiny={model}"],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


async def test_a_bare_folder_is_refused_once_there_are_checkpoints(database: Database, tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    await check_data_folder(database, folder)
    await record(database)
    with pytest.raises(InvalidRequest, match="mount its disk"):
        await check_data_folder(database, folder)
    (tmp_path / "data" / "checkpoints").mkdir(parents=True)
    await check_data_folder(database, folder)


async def test_a_folder_is_the_databases_that_came_first(
    database: Database, migrated_database: Path, tmp_path: Path
) -> None:
    """Housekeeping would remove every file with another database's rows. Processes of one service share a folder."""
    folder = DataFolder(tmp_path / "data")
    await asyncio.gather(*(check_data_folder(database, folder) for _ in range(4)))
    shutil.copy(migrated_database, tmp_path / "other.db")
    other = Database(create_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}"))
    try:
        with pytest.raises(InvalidRequest, match="belongs to another database"):
            await check_data_folder(other, folder)
        await check_data_folder(other, DataFolder(tmp_path / "theirs"))
        await check_data_folder(database, folder)
        with pytest.raises(InvalidRequest, match="belongs to another database"):
            await check_data_folder(database, DataFolder(tmp_path / "theirs"))
        (tmp_path / "theirs" / "database-id").unlink()
        await check_data_folder(database, DataFolder(tmp_path / "theirs"))
    finally:
        await other.close()


async def test_a_marks_row_and_bytes_are_on_the_disk_before_its_name(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that took one of them would leave a folder that is another database's from then on."""
    events, flush, link = list[str](), os.fsync, os.link

    def flushed(file: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        flush(file)

    def linked(source: Path, target: Path) -> None:
        events.append("linked")
        link(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "link", linked)
    await check_data_folder(database, DataFolder(tmp_path / "data"))
    # PostgreSQL keeps what it has committed.
    log = [f"{Path(str(database.engine.url.database)).name}-wal"] if database.has_one_service else []
    assert [event.partition(".")[0] if event.startswith("database-id") else event for event in events] == [
        *log,
        "database-id",
        "linked",
        "data",
    ]


async def test_an_empty_mark_is_none(database: Database, tmp_path: Path) -> None:
    folder, mark = DataFolder(tmp_path), tmp_path / "database-id"
    await check_data_folder(database, folder)
    marked = mark.read_text()
    mark.write_text("")
    await check_data_folder(database, folder)
    assert (mark.read_text(), [name for name in os.listdir(tmp_path) if "database-id" in name]) == (
        marked,
        ["database-id"],
    )


async def test_a_folder_that_another_database_marks_meanwhile_is_refused(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def slower(source: Path, target: Path) -> None:
        target.write_text("theirs\n")
        link(source, target)

    monkeypatch.setattr(os, "link", slower)
    with pytest.raises(InvalidRequest, match="belongs to another database"):
        await check_data_folder(database, DataFolder(tmp_path))
    assert (tmp_path / "database-id").read_text() == "theirs\n"


async def test_a_service_whose_database_is_gone_makes_none_and_removes_nothing(
    database: Database, tmp_path: Path, tiny_model_dir: Path
) -> None:
    data = tmp_path / "data"
    await check_data_folder(database, DataFolder(data))
    (data / "checkpoints" / "kept").mkdir(parents=True)
    ended = await served(data, tiny_model_dir)
    assert ended.returncode != 0
    assert "belongs to another database" in ended.stderr
    assert (sorted(path.name for path in data.iterdir()), (data / "checkpoints" / "kept").is_dir()) == (
        ["checkpoints", "database-id", "serve.lock"],
        True,
    )


async def test_a_service_whose_disk_is_not_mounted_does_not_start(
    database: Database, database_url: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Nothing is written where the disk is to be."""
    await record(database)
    (tmp_path / "data").mkdir()
    ended = await served(tmp_path / "data", tiny_model_dir, WEFT_DATABASE_URL=database_url)
    assert ended.returncode != 0
    assert "mount its disk" in ended.stderr
    assert not (tmp_path / "data" / "checkpoints").exists()
