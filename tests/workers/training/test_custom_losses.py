"""Custom losses in the worker: two rounds of passes, evaluated beside everybody's passes, in order, and replayed."""

import asyncio
from collections.abc import Sequence
from threading import Event, current_thread

import numpy as np
import pytest

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OperationKind, OptimStep, TrainingBatch
from engine.model.base import BaseModel
from engine.training.custom_loss import Evaluated, LossMeter
from engine.training.pass_operation import PassOperation
from engine.training.trainer import Trainer
from ledger.work_in_hand import read_record
from tests.custom_losses import LOGP, call, nodes
from tests.engine.training.conftest import make_batch
from tests.engine.training.test_custom_losses import batch_of, clipped, uploaded
from tests.workers.training.conftest import DEADLINE, Client, NewRig, undisturbed

STEP = OptimStep(learning_rate=1e-3)


def assert_trained(client: Client, base: BaseModel, work: list[TrainingBatch | OptimStep]) -> None:
    """Assert that the weights are those of the operations, one after another."""
    expected, found = undisturbed(base, client.lora, work).weights.vector, client.state().weights.vector
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


async def test_a_custom_loss_trains_in_order_beside_a_neighbour_and_is_replayed(
    new_rig: NewRig, base: BaseModel
) -> None:
    """Cut into pieces by the token budget, between other operations of its run; then the run is rebuilt from the ledger."""
    rig = new_rig(token_budget=16)
    plain, custom = make_batch(2, LossName.CROSS_ENTROPY, (6, 5)), batch_of(clipped)
    work: list[TrainingBatch | OptimStep] = [plain, custom, STEP, custom, custom, STEP]
    others: list[TrainingBatch | OptimStep] = [make_batch(3, LossName.PPO, (9, 4)), STEP] * 2
    async with rig.running():
        ours, theirs = await rig.clients("ours", "theirs")
        async with rig.database.write() as transaction:
            sent = [(ours, await ours.accept(transaction, one)) for one in work]
            sent += [(theirs, await theirs.accept(transaction, one)) for one in others]
        results = [await client.result(request) for client, request in sent]
        assert_trained(ours, base, work)
        assert_trained(theirs, base, others)
        told = results[1]
        assert isinstance(told, ForwardBackwardOutput)
        assert "custom/ratio:mean" in told.metrics
        rig.worker.outcomes.drop(ours.run)
        again = await ours.do(custom, kind=OperationKind.FORWARD)
        assert_trained(ours, base, work)
        assert isinstance(again, ForwardBackwardOutput)
        assert [one.shape for one in again.logprobs] == [datum.targets.shape for datum in custom.data]


async def test_nobody_waits_for_a_custom_loss_that_is_evaluated(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, evaluate = Event(), Event(), PassOperation.evaluate

    def held(operation: PassOperation, meter: LossMeter | None = None) -> Evaluated:
        begun.set()
        assert go_on.wait(DEADLINE)
        return evaluate(operation, meter)

    monkeypatch.setattr(PassOperation, "evaluate", held)
    rig, custom, beside = new_rig(), batch_of(clipped), make_batch(3, LossName.PPO, (9, 4))
    async with rig.running():
        ours, theirs = await rig.clients("ours", "theirs")
        sent = [await ours.send(custom), await ours.send(STEP)]
        assert await asyncio.to_thread(begun.wait, DEADLINE)
        for _ in range(3):
            assert isinstance(await theirs.do(beside), ForwardBackwardOutput)
        assert [await ours.is_pending(request) for request in sent] == [True, True]
        go_on.set()
        for request in sent:
            await ours.result(request)
        assert_trained(ours, base, [custom, STEP])


class Held:
    """Evaluations held until ``go_on`` is set, and the runs in the order in which they were evaluated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on, self.order = Event(), Event(), list[RunId]()
        evaluate = PassOperation.evaluate

        def held(operation: PassOperation, meter: LossMeter | None = None) -> Evaluated:
            self.order.append(operation.run)
            self.begun.set()
            assert self.go_on.wait(10 * DEADLINE)
            return evaluate(operation, meter)

        monkeypatch.setattr(PassOperation, "evaluate", held)


async def test_tenants_take_turns_with_custom_losses(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour's loss waits for the one under way only, and only that one is a suspect when the trainer dies."""
    held, rig, custom, beside = Held(monkeypatch), new_rig(), batch_of(clipped), make_batch(3, LossName.PPO, (9, 4))
    async with rig.running():
        hog, neighbour, third = await rig.clients("hog", "neighbour", "third")
        async with rig.database.write() as transaction:
            sent = [(hog, await hog.accept(transaction, custom)) for _ in range(4)]
        assert await asyncio.to_thread(held.begun.wait, DEADLINE)
        sent.append((neighbour, await neighbour.send(custom)))
        # A pass or two later the logprobs of both tenants' losses are known.
        for _ in range(3):
            await third.do(beside)
        record = read_record(rig.data_folder, rig.worker.leases.identity.id)
        assert record == [sent[0][1]]
        held.go_on.set()
        for client, request in sent:
            await client.result(request)
        assert held.order == [hog.run, neighbour.run, *[hog.run] * 3]
        assert_trained_gradient(hog, base, [custom] * 4)
        assert_trained_gradient(neighbour, base, [custom])


@pytest.mark.parametrize("way", ["refused", "too large", "no memory"])
async def test_a_custom_loss_that_fails_costs_its_tenant_no_more_than_it_computed(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Two tenants' small losses wait. By its third turn each has so much given back that the rest of its losses fit."""
    held, rig, custom, beside = Held(monkeypatch), new_rig(), batch_of(clipped), make_batch(3, LossName.PPO, (9, 4))
    plain = make_batch(2, LossName.CROSS_ENTROPY, (6, 5))
    middle = [call("loss", "torch.exp", LOGP)]
    if way == "too large":
        middle = [call("wide", "torch.arange", 2**31), call("loss", "torch.sum", {"ref": "wide"})]
    bad, evaluate = uploaded(nodes(*middle), plain), PassOperation.evaluate
    async with rig.running():
        ours, theirs, first, fourth = await rig.clients("ours", "theirs", "first", "fourth")

        def lacking(operation: PassOperation, meter: LossMeter | None = None) -> Evaluated:
            found = evaluate(operation, meter)
            if operation.run == ours.run:
                raise MemoryError("no memory is left for a custom loss")
            return found

        if way == "no memory":
            bad = custom
            monkeypatch.setattr(PassOperation, "evaluate", lacking)
        await first.send(custom)
        assert await asyncio.to_thread(held.begun.wait, DEADLINE)
        async with rig.database.write() as transaction:
            failing = [await ours.accept(transaction, bad) for _ in range(5)]
            good = [await theirs.accept(transaction, custom) for _ in range(5)]
        # A pass or two later the logprobs of both tenants' losses are known.
        for _ in range(3):
            await fourth.do(beside)
        held.go_on.set()
        for request in failing:
            with pytest.raises(EngineFailure):
                await ours.result(request)
        for request in good:
            await theirs.result(request)
        assert held.order == [first.run, *[ours.run, theirs.run] * 2, *[ours.run] * 3, *[theirs.run] * 3]
        assert_trained_gradient(theirs, base, [custom] * 5)


async def test_a_trainer_that_stops_evaluates_no_further_loss(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    held, rig, custom, beside = Held(monkeypatch), new_rig(), batch_of(clipped), make_batch(3, LossName.PPO, (9, 4))
    async with rig.running():
        hog, third = await rig.clients("hog", "third")
        async with rig.database.write() as transaction:
            sent = [await hog.accept(transaction, custom) for _ in range(4)]
        assert await asyncio.to_thread(held.begun.wait, DEADLINE)
        for _ in range(3):
            assert isinstance(await third.do(beside), ForwardBackwardOutput)
        rig.worker.stop()
        held.go_on.set()
    assert held.order == [hog.run]
    assert [await hog.is_pending(request) for request in sent] == [True] * 4


async def test_one_thread_changes_the_state_of_a_custom_loss(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads could end an operation between its two rounds, without a gradient."""
    threads, noted, ended = set[str](), PassOperation.note_evaluated, Trainer.end_complete

    def note(operation: PassOperation, found: Evaluated | WeftError) -> None:
        threads.add(current_thread().name)
        noted(operation, found)

    def end_complete(trainer: Trainer, in_order: Sequence[PassOperation]) -> None:
        threads.add(current_thread().name)
        ended(trainer, in_order)

    monkeypatch.setattr(PassOperation, "note_evaluated", note)
    monkeypatch.setattr(Trainer, "end_complete", end_complete)
    rig, custom, plain = new_rig(), batch_of(clipped), make_batch(2, LossName.CROSS_ENTROPY, (6, 5))
    bad = uploaded(nodes(call("loss", "torch.exp", LOGP)), plain)
    async with rig.running():
        ours, theirs = await rig.clients("ours", "theirs")
        for client in (ours, theirs):
            async with rig.database.write() as transaction:
                sent = [await client.accept(transaction, one) for one in (custom, bad, plain, custom)]
            for request in (sent[0], *sent[2:]):
                await client.result(request)
            with pytest.raises(EngineFailure, match="must be a scalar"):
                await client.result(sent[1])
            assert len(threads) == 1
            assert_trained_gradient(client, base, [custom, plain, custom])
            threads.clear()


def assert_trained_gradient(client: Client, base: BaseModel, work: list[TrainingBatch]) -> None:
    """Assert that the gradient is that of the operations, and nothing is missing."""
    expected, found = undisturbed(base, client.lora, list(work)).gradient, client.state().gradient
    assert expected is not None
    assert found is not None
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


async def test_a_custom_loss_that_fails_fails_alone(new_rig: NewRig, base: BaseModel) -> None:
    rig, plain = new_rig(), make_batch(2, LossName.CROSS_ENTROPY, (6, 5))
    hostile = uploaded(nodes(call("wide", "torch.arange", 2**31), call("loss", "torch.sum", {"ref": "wide"})), plain)
    vector = uploaded(nodes(call("loss", "torch.exp", LOGP)), plain)
    async with rig.running():
        ours, theirs = await rig.clients("ours", "theirs")
        for bad, told in ((hostile, "elements"), (vector, "must be a scalar")):
            with pytest.raises(EngineFailure, match=told):
                await ours.do(bad)
        for client in (ours, theirs):
            result = await client.do(plain)
            assert isinstance(result, ForwardBackwardOutput)
            assert all(np.isfinite(one).all() for one in result.logprobs)
            await client.do(STEP)
            assert_trained(client, base, [plain, STEP])
