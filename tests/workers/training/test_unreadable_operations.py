"""Recorded operations that cannot be read back fail by themselves: others of the base model, and of the run, go on."""

import pytest
from sqlalchemy import text

from contracts.errors import EngineFailure
from contracts.ids import RequestId
from contracts.ledger_records import OperationState
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, OptimStepped, TrainingBatch
from engine.model.base import BaseModel
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed

STEP = OptimStep(learning_rate=1e-3)
DAMAGES = {
    "damaged": "UPDATE operation_payloads SET body = :body WHERE operation_id = :id",
    "gone": "DELETE FROM operation_payloads WHERE operation_id = :id",
    "of an unknown kind": "UPDATE operations SET kind = 'merge' WHERE id = :id",
}


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


async def damage(rig: Rig, request: RequestId, how: str) -> None:
    """Make the recorded operation unreadable."""
    async with rig.database.write() as transaction:
        statement = text(DAMAGES[how])
        if ":body" in DAMAGES[how]:
            statement = statement.bindparams(body=b"\x81\xa4loss\xc1")
        await transaction.execute(statement.bindparams(id=request))


async def failure(client: Client, request: RequestId) -> tuple[str | None, str | None]:
    """Wait for the operation's end, and return its error's code and text."""
    status = await client.rig.ledger.wait_until_final(client.tenant, request, seconds=20)
    assert status.state is OperationState.FAILED
    return status.error_code, status.error_message


@pytest.mark.parametrize("how", DAMAGES)
async def test_an_operation_that_cannot_be_read_fails_alone(new_rig: NewRig, base: BaseModel, how: str) -> None:
    """The operation stands between others of its run, and beside another tenant's, when the worker looks for the first time."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
    requests = [await client.send(operation) for operation in (batch(1), batch(2), STEP, batch(3))]
    beside = [await other.send(operation) for operation in (batch(1), STEP)]
    await damage(rig, requests[1], how)
    rig = new_rig(url=rig.database.engine.url.render_as_string())
    client.rig = other.rig = rig
    async with rig.running():
        assert isinstance(await other.result(beside[1]), OptimStepped)
        code, message = await failure(client, requests[1])
        assert code == "unreadable_operation"
        assert "send it again" in (message or "")
        assert isinstance(await client.result(requests[3]), ForwardBackwardOutput)
        expected = undisturbed(base, client.lora, [batch(1), STEP, batch(3)]).weights.vector
        found = client.state().weights.vector
        assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


async def test_a_creation_that_cannot_be_read_ends_its_run_only(new_rig: NewRig) -> None:
    rig = new_rig()
    client, other = await rig.client("client"), await rig.client("other")
    behind = await client.send(STEP)
    await damage(rig, client.created, "damaged")
    async with rig.running():
        await other.result(other.created)
        assert (await failure(client, client.created))[0] == "unreadable_operation"
        assert (await failure(client, behind))[0] == "run_unloaded"
        assert isinstance(await other.do(STEP), OptimStepped)


async def test_a_run_whose_replay_cannot_be_read_is_told_so_and_others_go_on(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        for one in (client, other):
            done = await one.send(batch(1))
            await one.result(done)
            if one is client:
                await damage(rig, done, "damaged")
        for one in (client, other):
            rig.worker.outcomes.drop(one.run)
        assert isinstance(await other.do(STEP), OptimStepped)
        with pytest.raises(EngineFailure, match="load a checkpoint"):
            await client.do(STEP)


async def test_a_result_that_cannot_be_read_is_told_to_who_asks_for_it(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        done = [await one.send(batch(1)) for one in (client, other)]
        for one, request in zip((client, other), done, strict=True):
            await one.result(request)
        async with rig.database.write() as transaction:
            damaged = text("UPDATE operation_results SET body = :body WHERE operation_id = :id")
            await transaction.execute(damaged.bindparams(body=b"\xc1", id=done[0]))
        with pytest.raises(EngineFailure, match="cannot be read back"):
            await client.result(done[0])
        assert isinstance(await other.result(done[1]), ForwardBackwardOutput)
