"""Loads whose checkpoint's file is there and cannot be read: the run stays in memory, and the load ends some day."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor

from contracts.errors import EngineFailure
from contracts.losses import LossName
from contracts.operations import LoadWeights, OptimStep, OptimStepped, SaveWeights, TrainingBatch
from engine.model import adapter_folder
from engine.model.base import BaseModel
from store import unread_files
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed
from workers.training import adapter_tasks

STEP = OptimStep(learning_rate=1e-3)


class SickDisk:
    """A disk that cannot read the weights of checkpoints, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.failures = 0, 0
        self.has_failed = Event()
        self._read: Callable[..., dict[str, Tensor]] = adapter_folder.load_file
        monkeypatch.setattr(adapter_folder, "load_file", self._load)
        monkeypatch.setattr(adapter_tasks, "_PAUSE_SECONDS", 0.02)

    def _load(self, path: Path, device: str) -> dict[str, Tensor]:
        if self.failures < self.times:
            self.failures += 1
            self.has_failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(path, device=device)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SickDisk:
    """A disk that the test makes sick."""
    return SickDisk(monkeypatch)


def batch(seed: int) -> TrainingBatch:
    """A batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


def counted_restores(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the runs that are restored from now on, one entry for each time."""
    restored: list[str] = []
    bring_in = rig.residency.bring_in

    async def counted(operation: object) -> object:
        restored.append(operation.lane)  # type: ignore[attr-defined]
        return await bring_in(operation)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.residency, "bring_in", counted)
    return restored


async def saved(client: Client) -> LoadWeights:
    """Train, save, train on without a snapshot, and return the load of what was saved."""
    for operation in (batch(1), STEP, SaveWeights("ck"), batch(2), STEP):
        await client.do(operation)
    return LoadWeights(f"tinker://{client.run}/weights/ck", optimizer=True, creates=False)


async def test_a_load_that_cannot_read_its_file_once_is_done_without_a_restore(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, disk: SickDisk
) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        load = await saved(client)
        restored = counted_restores(rig, monkeypatch)
        disk.times = 1
        await client.do(load)
        assert (disk.failures, restored) == (1, [])
        for one in (client, other):
            await one.do(batch(3))
            await one.do(STEP)
        assert restored == []
    for one, done in ((client, [batch(1), STEP, batch(3), STEP]), (other, [batch(3), STEP])):
        assert torch.allclose(
            one.state().weights.vector, undisturbed(base, one.lora, done).weights.vector, rtol=1e-5, atol=1e-6
        )


async def test_a_replayed_load_that_cannot_read_its_file_once_is_replayed_from_there(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, disk: SickDisk
) -> None:
    rig = new_rig()
    monkeypatch.setattr(rig.residency, "snapshot", lambda _run: None)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await client.do(await saved(client))
        rig.worker.outcomes.drop(client.run)
        restored = counted_restores(rig, monkeypatch)
        disk.times = 1
        assert isinstance(await client.do(STEP), OptimStepped)
        assert isinstance(await other.do(STEP), OptimStepped)
        assert (disk.failures, restored) == (1, [client.run])
        expected = undisturbed(base, client.lora, [batch(1), STEP, STEP]).weights.vector
        assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)


async def test_a_load_whose_file_stays_unreadable_fails_and_its_run_and_a_neighbours_go_on(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, disk: SickDisk
) -> None:
    """No time counts while the data folder itself is away."""
    monkeypatch.setattr(unread_files, "LONGEST_SECONDS", 0.3)
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        load = await saved(client)
        restored = counted_restores(rig, monkeypatch)
        disk.times = 10_000
        folder = rig.data_folder.path("checkpoints")
        away = folder.rename(folder.with_name("away"))
        waiting = await client.send(load)
        for seed in range(4, 24):
            await other.do(batch(seed))
        assert await client.is_pending(waiting)
        away.rename(folder)
        assert isinstance(await other.do(STEP), OptimStepped)
        with pytest.raises(EngineFailure, match="the checkpoint's file cannot be read"):
            await client.result(waiting)
        assert disk.failures > 1
        await client.do(batch(3))
        await client.do(STEP)
        assert restored == []
    expected = undisturbed(base, client.lora, [batch(1), STEP, batch(2), STEP, batch(3), STEP]).weights.vector
    assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)
