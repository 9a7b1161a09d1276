"""Runs whose snapshot's file is there and cannot be read: they wait for it, and their operations end some day."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from contracts.errors import EngineFailure
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import LoadWeights, OptimStep, OptimStepped, SaveWeights, TrainingBatch
from engine.model.base import BaseModel
from engine.training import adapter_state
from store import unread_files
from store.data_folder import DataFolder
from store.tables import Operation, Run, RunState
from tenants.runs import NewRun
from testing.runs import create_run
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import BASE, Client, NewRig, Rig, undisturbed
from tests.workers.training.test_residency import assert_bit_equal, out_of_memory
from tests.workers.training.test_unread_checkpoints import SickDisk
from workers.training import adapter_tasks

STEP = OptimStep(learning_rate=1e-3)


class SickFile:
    """A disk that cannot read the snapshot of one run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path: Path | None = None
        self.failures = 0
        self._open: Callable[..., Any] = adapter_state.safe_open
        monkeypatch.setattr(adapter_state, "safe_open", self._opened)
        monkeypatch.setattr(adapter_tasks, "_PAUSE_SECONDS", 0.02)

    def _opened(self, path: Path, **options: Any) -> Any:
        if path.parent == self.path:
            self.failures += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._open(path, **options)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


async def run_of(rig: Rig, run: RunId) -> Run:
    """Return the run's row."""
    async with rig.database.read() as session:
        return (await session.scalars(select(Run).where(Run.id == run))).one()


async def codes(rig: Rig, run: RunId) -> list[str | None]:
    """Return the error codes of the run's last two operations, an unload left out."""
    async with rig.database.read() as session:
        found = await session.scalars(
            select(Operation.error_code)
            .where(Operation.lane == run, Operation.seq_id < 1000)
            .order_by(Operation.seq_id)
        )
        return list(found)[-2:]


async def made_from(client: Client, path: str) -> Client:
    """Have the creation of another model of the client's tenant from a checkpoint accepted."""
    async with client.rig.database.write() as transaction:
        run = await create_run(
            transaction, client.tenant, NewRun(client.session, 1, BASE, client.lora, None), client.rig.runtime.clock
        )
    made = Client(client.rig, client.tenant, client.session, run, client.lora)
    made.created = await made.send(LoadWeights(path, optimizer=False, creates=True), seq_id=0)
    return made


async def paged_out(rig: Rig, *clients: Client) -> None:
    """Train, and page the clients' adapters out."""
    for client in clients:
        await client.do(batch(1))
        await client.do(STEP)
        await out_of_memory(rig, client)


async def test_a_snapshot_that_stays_unreadable_fails_its_runs_operations_and_the_run_can_be_unloaded(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time counts while the folder of snapshots itself is away. A neighbour comes in and trains meanwhile."""
    disk, rig = SickFile(monkeypatch), new_rig()
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", 0.3)
    async with rig.running():
        cats, dogs, birds = await rig.clients("cats", "dogs", "birds")
        await paged_out(rig, cats, dogs)
        disk.path = rig.data_folder.path((await run_of(rig, cats.run)).snapshot_dir or "")
        folder = rig.data_folder.path("snapshots")
        away = folder.rename(folder.with_name("away"))
        waiting = [await cats.send(batch(2)), await cats.send(STEP)]
        for seed in range(4, 24):
            await birds.do(batch(seed))
        assert await cats.is_pending(waiting[0])
        away.rename(folder)
        assert isinstance(await dogs.do(STEP), OptimStepped)
        for request in waiting:
            with pytest.raises(EngineFailure, match="training state could not be restored: its snapshot's file cannot"):
                await cats.result(request)
        assert disk.failures > 2
        assert await codes(rig, cats.run) == ["state_unrestored"] * 2
        await cats.unload()
        assert (await run_of(rig, cats.run)).state == RunState.UNLOADED
        assert isinstance(await dogs.do(STEP), OptimStepped)
        assert_bit_equal(dogs.state(), undisturbed(base, dogs.lora, [batch(1), STEP, STEP, STEP]))


async def test_a_run_whose_operations_failed_for_its_unread_snapshot_trains_on_once_the_file_can_be_read(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot of the failed operations' run is kept. A neighbour trains on."""
    disk, rig = SickFile(monkeypatch), new_rig()
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", -1.0)
    async with rig.running():
        cats, dogs = await rig.clients("cats", "dogs")
        await paged_out(rig, cats)
        disk.path = rig.data_folder.path((await run_of(rig, cats.run)).snapshot_dir or "")
        with pytest.raises(EngineFailure, match="could not be restored"):
            await cats.do(batch(2))
        assert isinstance(await dogs.do(STEP), OptimStepped)
        disk.path = None
        assert isinstance(await cats.do(STEP), OptimStepped)
        assert_bit_equal(cats.state(), undisturbed(base, cats.lora, [batch(1), STEP, STEP]))


async def test_a_run_made_from_a_checkpoint_that_stays_unreadable_ends_its_operations_too(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has no snapshot yet when it leaves memory. The checkpoint's own run trains on."""
    disk, rig = SickDisk(monkeypatch), new_rig()
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", 0.1)
    monkeypatch.setattr(rig.residency, "snapshot", lambda _run: None)
    async with rig.running():
        (dogs,) = await rig.clients("dogs")
        await dogs.do(batch(1))
        await dogs.do(SaveWeights("kept"))
        path = f"tinker://{dogs.run}/weights/kept"
        cats = await made_from(dogs, path)
        await cats.result(cats.created)
        rig.worker.outcomes.drop(cats.run)
        disk.times = 1_000_000
        with pytest.raises(EngineFailure, match="could not be restored: its checkpoint's file cannot be read"):
            await cats.do(batch(2))
        await cats.unload()
        assert isinstance(await dogs.do(STEP), OptimStepped)


async def test_tries_that_lie_far_apart_do_not_make_a_file_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may have been there in between, when no try was made. Another file's tries count by themselves."""
    (tmp_path / "snapshots").mkdir()
    now = [1000.0]
    monkeypatch.setattr(unread_files, "monotonic", lambda: now[0])
    unread = unread_files.UnreadFiles(DataFolder(tmp_path), "snapshots")
    assert not await unread.is_lost("mine")
    now[0] += 24 * 3600
    assert not await unread.is_lost("mine")
    for _ in range(int(unread_files.LONGEST_SECONDS)):
        now[0] += 1
        is_lost = await unread.is_lost("theirs")
    assert not is_lost
    now[0] += 2
    assert await unread.is_lost("theirs")
    assert not await unread.is_lost("mine")
