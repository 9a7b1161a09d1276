"""Samples of an adapter whose files are there and cannot be read: they wait for them, and end some day."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from contracts.base_model import read_base_model_facts
from contracts.ledger_records import OperationState
from contracts.operations import LoraSettings
from engine.model import adapter_folder
from engine.model.adapter_folder import write_adapter_files
from engine.model.base import BaseModel
from engine.training.trainer import fresh_state
from store import unread_files
from store.clock import utc_now
from store.database import Database, create_engine
from tenants.checkpoints import directory_of
from tenants.gates import make_gates
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import BASE, SECONDS, Drawer, make_sampling
from tests.workers.sampling.test_dispatch import LiveRun, live_run
from workers.sampling import worker


class SickFiles:
    """A disk that cannot read the adapters of one folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder: Path | None = None
        self.failed = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._load, self._why = adapter_folder.load_file, adapter_folder.why_unreadable
        monkeypatch.setattr(adapter_folder, "load_file", self._loaded)
        monkeypatch.setattr(adapter_folder, "why_unreadable", self._told)
        monkeypatch.setattr(worker, "_FIRST_PAUSE_SECONDS", 0.02)
        monkeypatch.setattr(worker, "SWEEP_SECONDS", 0.05)

    def _loaded(self, path: Path, **options: Any) -> Any:
        if path.parent == self.folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._load(path, **options)

    def _told(self, path: Path, *why: Any) -> Any:
        self._loop.call_soon_threadsafe(self.failed.release)
        return self._why(path, *why)

    async def fail(self, times: int) -> None:
        """Wait until so many more tries have failed."""
        async with asyncio.timeout(SECONDS):
            for _ in range(times):
                await self.failed.acquire()


async def test_a_sample_whose_adapter_stays_unreadable_ends_and_its_neighbours_are_drawn(
    database_url: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time counts while the folder of all adapters is away. Once its files can be read, the next sample is drawn."""
    disk = SickFiles(monkeypatch)
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", 0.1)
    database = Database(create_engine(database_url))
    runtime = make_runtime(database, tmp_path, utc_now)
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    cat, dog = await live_run(database, "cat"), await live_run(database, "dog")

    def folder_of(run: LiveRun) -> Path:
        return runtime.data_folder.path(directory_of(run.version))

    for run in (cat, dog):
        folder_of(run).mkdir(parents=True)
        write_adapter_files(folder_of(run), base, fresh_state(base, LoraSettings(4, seed=1)).weights)
        async with database.write() as transaction:
            await make_gates(transaction, run.gates(), utc_now)
    disk.folder = folder_of(cat)
    mine, beside = (Drawer(runtime, run.tenant, run.samplers[0]) for run in (cat, dog))
    sampling = make_sampling(runtime, base, tiny_model_dir)
    await sampling.pool.start()
    working = asyncio.create_task(sampling.worker.run())
    try:
        folder = folder_of(cat).parent
        assert (await beside.result(await beside.send(6))).sequences
        away = folder.rename(folder.with_name("away"))
        waiting = await mine.send(5)
        await disk.fail(10)
        assert (await mine.row(waiting)).state is not OperationState.FAILED
        away.rename(folder)
        status = await runtime.ledger.wait_until_final(mine.tenant, waiting, seconds=SECONDS)
        assert (status.state, status.error_code) == (OperationState.FAILED, "engine_failure")
        assert "its adapter's files cannot be read" in (status.error_message or "")
        assert (await beside.result(await beside.send(6))).sequences
        disk.folder = None
        assert (await mine.result(await mine.send(5))).sequences
    finally:
        sampling.worker.stop()
        await working
        await sampling.pool.close()
        await database.close()
