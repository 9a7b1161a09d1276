"""An exception that nobody foresaw fails the operation at hand, or has its run rebuilt. The base model trains on."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from sqlalchemy import func, select

from contracts.errors import EngineFailure, ProcessMustEnd
from contracts.ledger_records import OperationState, ReadyOperation
from contracts.operations import ForwardBackwardOutput, OptimStepped, SaveWeights, WeightsSaved
from engine.model.base import BaseModel
from engine.model.device import SelfTest
from engine.training.pass_operation import PassOperation, PassPiece
from engine.training.trainer import ComputedPass
from store.tables import Operation, Run
from tests.engine.training.test_custom_losses import batch_of, clipped
from tests.workers.training.conftest import DEADLINE, Client, NewRig, undisturbed
from tests.workers.training.test_worker import STEP, batch
from workers.training.training_engine import TrainingEngine

Patch = Callable[[pytest.MonkeyPatch], None]


def raising_once(call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return ``call``, whose first call raises ``error``."""
    errors = [error]

    def once(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(*args, **options)

    return once


def self_test_without_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SelfTest, "_logits", raising_once(SelfTest._logits, MemoryError()))


def self_test_without_thread(patch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("can't start new thread")
    patch.setattr("workers.training.training_engine.asyncio.to_thread", raising_once(asyncio.to_thread, error))


def self_test_that_raises(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TrainingEngine, "check_device", raising_once(TrainingEngine.check_device, ValueError("no test")))


def assert_trained(client: Client, base: BaseModel, steps: int) -> None:
    """Assert that each step has counted once."""
    expected = undisturbed(base, client.lora, [batch(1), STEP] * steps).weights.vector
    assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fail", [self_test_without_memory, self_test_without_thread, self_test_that_raises])
async def test_an_error_at_the_end_of_a_failed_pass_ends_nobody_elses_training(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, fail: Patch
) -> None:
    """The pass of one operation fails whole, and what looks at the device after it raises as well."""
    rig = new_rig()
    compute = rig.trainer.compute
    async with rig.running():
        client, other = await rig.clients("client", "other")
        failing = raising_once(compute, TypeError("nobody foresaw this"))

        def one_fails(pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
            found: ComputedPass = (failing if pieces[0].operation.run == client.run else compute)(pieces, slots=slots)
            return found

        monkeypatch.setattr(rig.trainer, "compute", one_fails)
        fail(monkeypatch)
        with pytest.raises(EngineFailure, match="weft failed"):
            await client.do(batch(1))
        for one in (other, client):
            assert isinstance(await one.do(batch(1)), ForwardBackwardOutput)
            assert isinstance(await one.do(STEP), OptimStepped)
            assert_trained(one, base, 1)
        late = await rig.client("late")
        await late.result(late.created)


async def test_a_pass_that_cannot_be_planned_is_planned_again(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at the second of two operations: no piece of the first is lost."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.05)
    rig = new_rig()
    async with rig.running():
        clients = await rig.clients("client", "other")
        telemetry = rig.worker.outcomes._telemetry
        claimed, errors = telemetry.claimed, [MemoryError()]

        def fail_once(operations: Sequence[ReadyOperation]) -> None:
            if errors and any(one.lane == clients[1].run for one in operations):
                raise errors.pop()
            claimed(operations)

        monkeypatch.setattr(telemetry, "claimed", fail_once)
        async with rig.database.write() as transaction:
            requests = [
                (one, await one.accept(transaction, payload)) for one in clients for payload in (batch(1), STEP)
            ]
        for one, request in requests:
            await one.result(request)
        assert not errors
        for one in clients:
            assert_trained(one, base, 1)


async def test_a_custom_loss_that_cannot_be_noted_fails_alone(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = raising_once(PassOperation.note_evaluated, MemoryError())
    monkeypatch.setattr(PassOperation, "note_evaluated", lambda *args: noted(*args))
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        with pytest.raises(EngineFailure):
            await client.do(batch_of(clipped))
        for one in (other, client):
            assert isinstance(await one.do(batch_of(clipped)), ForwardBackwardOutput)


async def test_an_error_after_a_save_was_recorded_has_its_run_rebuilt(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        for one in (client, other):
            await one.do(batch(1))
            await one.do(STEP)
        monkeypatch.setattr(rig.residency, "snapshot", raising_once(rig.residency.snapshot, MemoryError()))
        assert isinstance(await client.do(SaveWeights("first")), WeightsSaved)
        for one in (other, client):
            assert isinstance(await one.do(SaveWeights("second")), WeightsSaved)
            await one.do(batch(1))
            await one.do(STEP)
            assert_trained(one, base, 2)


@pytest.mark.parametrize("where", ["finished", "steps_done"])
async def test_a_step_takes_effect_once_when_its_end_cannot_be_noted(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Both tenants' steps are taken together."""
    rig = new_rig()
    async with rig.running():
        clients = await rig.clients("client", "other")
        for one in clients:
            await one.do(batch(1))
        telemetry = rig.worker.outcomes._telemetry
        monkeypatch.setattr(telemetry, where, raising_once(getattr(telemetry, where), MemoryError()))
        async with rig.database.write() as transaction:
            requests = [(one, await one.accept(transaction, STEP)) for one in clients]
        for one, request in requests:
            assert isinstance(await one.result(request), OptimStepped)
        for one in clients:
            await one.do(batch(1))
            await one.do(STEP)
            assert_trained(one, base, 2)


async def test_a_trainer_whose_results_are_not_written_any_more_ends(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other trainers may claim the runs, and no operation has failed."""
    rig = new_rig()
    monkeypatch.setattr(rig.worker.outcomes, "_written", raising_once(rig.worker.outcomes._written, TypeError()))
    task = asyncio.create_task(rig.worker.run())
    client, other = await rig.clients("client", "other")
    await client.send(batch(1))
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(ProcessMustEnd):
            await task
    pending = await other.send(batch(1))
    assert await other.is_pending(pending)
    async with rig.database.read() as session:
        assert await session.scalar(select(func.count()).where(Run.trainer_id.is_not(None))) == 0
        assert await session.scalar(select(func.count()).where(Operation.state == OperationState.FAILED)) == 0
