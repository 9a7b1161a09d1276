"""Checkpoints' files beside training: what is recorded of them, and who waits for whose."""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import select

from contracts.errors import EngineFailure
from contracts.operations import (
    ExternalWeightsSaved,
    LoadWeights,
    LoraSettings,
    OperationKind,
    SaveWeights,
    SaveWeightsExternal,
    WeightsLoaded,
    WeightsSaved,
)
from contracts.paths import Segment
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState
from store.clock import utc_now
from store.tables import Checkpoint
from tenants.checkpoints import CHECKPOINTS, NewCheckpoint, directory_of, new_checkpoint_id, record_checkpoint
from testing.held_file import PATIENCE_SECONDS
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig
from tests.workers.training.test_worker import batch
from workers.training import checkpoint_operations, snapshot_writer


class HeldWrites:
    """Calls of a function that writes files; those for adapters of ``seeds`` wait until they are let go."""

    def __init__(self, write: Any, seeds: Collection[int] = ()) -> None:
        self._write, self._loop, self._seeds = write, asyncio.get_running_loop(), seeds
        self.begun, self.gate = asyncio.Event(), Event()
        self.count = 0

    def __call__(self, directory: Path, base: BaseModel, written: Any, *given: Any, **named: Any) -> Any:
        settings = written.weights.settings if isinstance(written, AdapterState) else written.settings
        if settings.seed in self._seeds:
            self.count += 1
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self.gate.wait(PATIENCE_SECONDS)
        return self._write(directory, base, written, *given, **named)


async def runs_of_a_tenant(rig: Rig, count: int, seed: int) -> list[Client]:
    """Make a tenant of so many models of that seed, each with a pass."""
    lora = LoraSettings(rank=4, seed=seed)
    first = await rig.client("many", lora)
    made = [first, *[await rig.model(first.tenant, first.session, lora, number) for number in range(1, count)]]
    for client in made:
        await client.result(client.created)
        await client.do(batch(1))
    return made


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[tuple[HeldWrites, HeldWrites]]:
    """Hold writes of checkpoints and of snapshots of adapters of that seed meanwhile."""
    held = HeldWrites(checkpoint_operations.write_checkpoint, [seed]), HeldWrites(snapshot_writer.write_state, [seed])
    monkeypatch.setattr(checkpoint_operations, "write_checkpoint", held[0])
    monkeypatch.setattr(snapshot_writer, "write_state", held[1])
    try:
        yield held
    finally:
        for one in held:
            one.gate.set()


@pytest.mark.parametrize("kind", ["checkpoints", "snapshots"])
async def test_one_tenants_many_writes_stand_before_no_other_tenants(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The disk hangs at all files of one tenant, which has more runs than there are threads and a creation that waits."""
    rig, seed = new_rig(), 7
    async with rig.running():
        many = await runs_of_a_tenant(rig, 20, seed)
        (other,) = await rig.clients("other")
        await other.do(batch(1))
        with held_writes(monkeypatch, seed) as (checkpoints, snapshots):
            saving = []
            if kind == "checkpoints":
                saving = [await one.send(SaveWeights("slow")) for one in many]
            else:
                for one in many:
                    rig.residency.snapshot(one.run)
            writes = checkpoints if kind == "checkpoints" else snapshots
            async with asyncio.timeout(2 * DEADLINE):
                while writes.count < 2:
                    await writes.begun.wait()
                    writes.begun.clear()
            mine = await rig.model(many[0].tenant, many[0].session, many[0].lora, 20)
            assert isinstance(await other.do(SaveWeights("quick")), WeightsSaved)
            theirs = await rig.model(other.tenant, other.session, other.lora, 1)
            await theirs.result(theirs.created)
            load = LoadWeights(f"tinker://{other.run}/weights/quick", optimizer=False, creates=False)
            assert isinstance(await theirs.do(load), WeightsLoaded)
            assert writes.count == 2
        for client, request in zip(many, saving, strict=False):
            assert isinstance(await client.result(request), WeightsSaved)
        await mine.result(mine.created)


async def test_a_save_whose_name_a_job_takes_meanwhile_replaces_nothing(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free when the save begins to write. Another run's save of the same name is no matter."""
    rig, external = new_rig(), OperationKind.SAVE_WEIGHTS_EXTERNAL
    held = HeldWrites(checkpoint_operations.write_external_files, [1])
    async with rig.running():
        saver, other = await rig.clients("saver", "other")
        assert isinstance(await other.do(SaveWeightsExternal("merged"), kind=external), ExternalWeightsSaved)
        monkeypatch.setattr(checkpoint_operations, "write_external_files", held)
        saving = await saver.send(SaveWeightsExternal("merged"), kind=external)
        async with asyncio.timeout(DEADLINE):
            await held.begun.wait()
        id = new_checkpoint_id()
        new = NewCheckpoint(id, saver.run, Segment.EXTERNAL_WEIGHTS, "merged", 7, None, True, None)
        async with rig.database.write() as transaction:
            await record_checkpoint(transaction, saver.tenant, new, utc_now)
        held.gate.set()
        with pytest.raises(EngineFailure, match="choose another name"):
            await saver.result(saving)
    async with rig.database.read() as session:
        rows = await session.execute(select(Checkpoint.run_id, Checkpoint.directory))
        recorded = {row.run_id: row.directory for row in rows}
    assert recorded[saver.run] == directory_of(id)
    assert rig.data_folder.folders(CHECKPOINTS) == [recorded[other.run]]
