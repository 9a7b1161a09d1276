"""A load loads the checkpoint that its name stood for when it was accepted, each time it runs or is replayed."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from sqlalchemy import select, update

from contracts.errors import EngineFailure
from contracts.losses import LossName
from contracts.operations import (
    ForwardBackwardOutput,
    LoadWeights,
    OptimizerName,
    OptimStep,
    OptimStepped,
    SaveWeights,
    TrainingBatch,
)
from contracts.paths import CheckpointPath, Segment
from engine.model.base import BaseModel
from store.clock import utc_now
from store.tables import AuditEntry, Run
from tenants.checkpoint_holds import release_holds
from tenants.checkpoints import delete_checkpoint
from tenants.recorded_folders import Discarded, removable
from tenants.sharing import set_public
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed

STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


def load_of(client: Client, name: str = "ck") -> LoadWeights:
    """Return a load of the client's checkpoint."""
    return LoadWeights(f"tinker://{client.run}/weights/{name}", optimizer=True, creates=False)


async def delete(client: Client, name: str = "ck") -> None:
    """Delete a checkpoint as its owner does."""
    async with client.rig.database.write() as transaction:
        path = CheckpointPath(client.run, Segment.WEIGHTS, name)
        await delete_checkpoint(transaction, client.tenant, path, utc_now)


async def to_remove(rig: Rig) -> list[Discarded]:
    """Return what housekeeping would remove, long after now."""
    async with rig.database.write() as transaction:
        await release_holds(transaction, most=10)
    async with rig.database.read() as session:
        return await removable(session, discarded_before=utc_now() + timedelta(hours=1), most=10)


@pytest.mark.parametrize("then", ["overwritten", "deleted"])
async def test_a_replay_loads_what_was_loaded(new_rig: NewRig, base: BaseModel, tmp_path: Path, then: str) -> None:
    """No snapshot covers the load when its checkpoint's name is given away. Another tenant's checkpoint is deleted, too."""
    rig = new_rig()
    rig.residency.snapshot = lambda _run: None  # type: ignore[method-assign]
    async with rig.running():
        client, other = await rig.clients("client", "other")
        for one in (client, other):
            for operation in (batch(1), STEP, SaveWeights("ck"), batch(2), STEP):
                await one.do(operation)
        await client.do(load_of(client))
        await client.do(batch(3))
        await client.do(STEP)
        if then == "overwritten":
            await client.do(SaveWeights("ck", overwrite=True))
        else:
            await delete(client)
        await delete(other)
        folders = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
        assert len(folders) == (3 if then == "overwritten" else 2), "no folder is gone"
        (going,) = await to_remove(rig)
        rig.worker.outcomes.drop(client.run)
        assert isinstance(await client.do(STEP), OptimStepped)
        expected = undisturbed(base, client.lora, [batch(1), STEP, batch(3), STEP, STEP]).weights.vector
        assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)
    # The end of the worker wrote no snapshot, since the test keeps it from that.
    assert (await to_remove(rig)) == [going]
    del rig.residency.snapshot  # type: ignore[method-assign]
    again = new_rig(url=rig.database.engine.url.render_as_string())
    client.rig = again
    async with again.running():
        await client.do(batch(4))
    assert len(await to_remove(again)) == 2, "a snapshot covers the load now"


@pytest.mark.parametrize("then", ["overwritten", "deleted"])
async def test_a_load_that_waits_loads_what_its_name_stood_for_when_it_was_accepted(
    new_rig: NewRig, base: BaseModel, then: str
) -> None:
    """The checkpoint is another run's. Its owner gives the name away while no trainer works."""
    rig = new_rig()
    async with rig.running():
        (owner,) = await rig.clients("owner")
        client = await rig.model(owner.tenant, owner.session, owner.lora, number=1)
        await client.result(client.created)
        for operation in (batch(1), STEP, SaveWeights("ck")):
            await owner.do(operation)
        waiting = await client.send(load_of(owner), seq_id=2)
        if then == "overwritten":
            for operation in (batch(2), STEP, SaveWeights("ck", overwrite=True)):
                await owner.do(operation)
        else:
            await delete(owner)
        assert await to_remove(rig) == []
        await client.send(STEP, seq_id=1)
        await client.result(waiting)
        expected = undisturbed(base, owner.lora, [batch(1), STEP]).weights.vector
        assert torch.equal(client.state().weights.vector, expected)


async def test_a_load_behind_a_save_of_its_own_run_loads_what_is_saved(new_rig: NewRig, base: BaseModel) -> None:
    """All are accepted at once, and the name was there before."""
    rig = new_rig()
    async with rig.running():
        (client,) = await rig.clients("client")
        for operation in (batch(1), STEP, SaveWeights("ck")):
            await client.do(operation)
        requests = [
            await client.send(one)
            for one in (batch(2), STEP, SaveWeights("ck", overwrite=True), batch(3), STEP, load_of(client))
        ]
        await client.result(requests[-1])
        expected = undisturbed(base, client.lora, [batch(1), STEP, batch(2), STEP]).weights.vector
        assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)


async def test_a_load_without_a_checkpoint_fails_when_it_runs(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        with pytest.raises(EngineFailure, match="no checkpoint"):
            await client.do(load_of(client, "nowhere"))
        assert isinstance(await other.do(STEP), OptimStepped)


async def train_with(client: Client, optimizer: OptimizerName) -> None:
    """Have the client's run recorded as one of the optimizer."""
    async with client.rig.database.write() as transaction:
        await transaction.execute(update(Run).where(Run.id == client.run).values(optimizer=optimizer))


@pytest.mark.parametrize("theirs", list(OptimizerName))
async def test_a_load_of_another_optimizers_state_is_refused_and_changes_nothing(
    new_rig: NewRig, theirs: OptimizerName
) -> None:
    """Without the optimizer state it is loaded, and a run of that optimizer loads all of it."""
    (ours,) = set(OptimizerName) - {theirs}
    rig = new_rig()
    async with rig.running():
        client, neighbour = await rig.clients("client", "neighbour")
        source, alike = [await rig.model(client.tenant, client.session, client.lora, number=n) for n in (1, 2)]
        for one, optimizer in ((client, ours), (source, theirs), (alike, theirs)):
            await one.result(one.created)
            await train_with(one, optimizer)
            await one.do(batch(1))
            await one.do(OptimStep(learning_rate=1e-3, optimizer=optimizer))
        await source.do(SaveWeights("ck"))
        before = client.state()
        with pytest.raises(EngineFailure, match=f"state of {theirs}.*trains with {ours}.*load_state"):
            await client.do(load_of(source))
        assert client.state() is before
        assert isinstance(await client.do(OptimStep(learning_rate=1e-3, optimizer=ours)), OptimStepped)
        await client.do(replace(load_of(source), optimizer=False))
        assert isinstance(await client.do(OptimStep(learning_rate=1e-3, optimizer=ours)), OptimStepped)
        await alike.do(load_of(source))
        assert isinstance(await alike.do(OptimStep(learning_rate=1e-3, optimizer=theirs)), OptimStepped)
        assert isinstance(await neighbour.do(STEP), OptimStepped)


async def test_a_load_of_another_optimizers_state_that_is_recorded_is_replayed(new_rig: NewRig) -> None:
    rig = new_rig()
    rig.residency.snapshot = lambda _run: None  # type: ignore[method-assign]
    async with rig.running():
        client, other = await rig.clients("client", "other")
        for operation in (batch(1), STEP, SaveWeights("ck"), load_of(client)):
            await client.do(operation)
        await train_with(client, OptimizerName.DIMUON)
        rig.worker.outcomes.drop(client.run)
        for one in (client, other):
            assert isinstance(await one.do(batch(2)), ForwardBackwardOutput)


async def test_a_load_that_finds_another_tenants_checkpoint_in_its_turn_only_is_told_in_both_logs(
    new_rig: NewRig,
) -> None:
    """The owner publishes it after the load was accepted."""
    rig = new_rig()
    async with rig.running():
        owner, other = await rig.clients("owner", "other")
        await owner.do(SaveWeights("ck"))
        waiting = await other.send(load_of(owner), seq_id=2)
        async with rig.database.write() as transaction:
            path = CheckpointPath(owner.run, Segment.WEIGHTS, "ck")
            await set_public(transaction, owner.tenant, path, utc_now, public=True)
        await other.send(STEP, seq_id=1)
        await other.result(waiting)
    async with rig.database.read() as session:
        of_use = AuditEntry.action.in_(["run_load", "checkpoint_read"])
        rows = list(await session.scalars(select(AuditEntry).where(of_use)))
    told = {row.tenant_id: (row.action, row.resource_id, row.door) for row in rows}
    assert (len(rows), told[other.tenant]) == (2, ("run_load", other.run, "service"))
    assert told[owner.tenant] == ("checkpoint_read", str(path), "share")
