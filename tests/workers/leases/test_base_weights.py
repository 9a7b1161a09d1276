"""A process with other base weights than those its runs were trained on gets none of their work, until they are accepted."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner

from cli.doctor import examine
from cli.main import app
from engine.model.tiny_model import write_tiny_model
from ledger.runtime import Runtime
from store.clock import utc_now
from store.database import Database, create_engine
from store.settings import Settings
from store.tables import ProcessKind, WorkerProcess
from telemetry.readiness import NotReady
from tests.workers.runtimes import make_runtime
from workers.leases.base_weights import WeightsCheck
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import WorkerIdentity, new_identity
from workers.leases.runs import RunLeases

BASE = "weft/tiny"


@pytest.fixture
async def runtime(migrated_database: Path, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A runtime on SQLite."""
    shutil.copy(migrated_database, tmp_path / "weft.db")
    database = Database(create_engine(f"sqlite+aiosqlite:///{tmp_path}/weft.db"))
    yield make_runtime(database, tmp_path, utc_now, lease=timedelta(seconds=30))
    await database.close()


async def living(runtime: Runtime, identity: WorkerIdentity) -> bool:
    """Return whether the process has a lease."""
    async with runtime.database.read() as session:
        found = select(func.count()).where(WorkerProcess.id == identity.id)
        return bool(await session.scalar(found))


async def test_a_process_with_other_base_weights_gets_no_work_until_they_are_accepted(
    runtime: Runtime, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Trainers and pools; those with the first weights go on beside it, until an operator accepts the others."""
    other_folder = tmp_path / "other"
    write_tiny_model(other_folder, seed=7)

    def made(folder: Path) -> tuple[RunLeases, PoolHeartbeat]:
        weights = WeightsCheck(runtime, BASE, folder)
        trainer = RunLeases(new_identity(ProcessKind.TRAINER, BASE), runtime, weights=weights)
        return trainer, PoolHeartbeat(
            new_identity(ProcessKind.POOL, BASE), runtime, WeightsCheck(runtime, BASE, folder)
        )

    trainer, pool = made(tiny_model_dir)
    other_trainer, other_pool = made(other_folder)
    for process in (trainer, pool, other_trainer, other_pool):
        await process.look()
    assert [await living(runtime, one.identity) for one in (trainer, pool, other_trainer, other_pool)] == [
        True,
        True,
        False,
        False,
    ]
    assert pool.has_looked.is_set()
    assert not other_pool.has_looked.is_set()
    for process in (other_trainer, other_pool):
        with pytest.raises(NotReady, match="weft base accept weft/tiny"):
            await process.check()
    given = Settings(data_dir=tmp_path, base_models=(f"{BASE}={other_folder}",), port=0)
    (finding,) = [one for one in await asyncio.to_thread(examine, given) if one.part == f"weights of {BASE}"]
    assert not finding.is_well
    command = ["base", "accept", BASE, "--base-model", f"{BASE}={other_folder}", "--data", str(tmp_path)]
    accepted = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert accepted.exit_code == 0, accepted.output
    for process in (other_trainer, other_pool, trainer, pool):
        await process.look()
    assert await living(runtime, other_trainer.identity)
    assert await living(runtime, other_pool.identity)
    await other_trainer.check()
    with pytest.raises(NotReady, match="other weights"):
        await trainer.check()
    assert not pool.has_looked.is_set()
