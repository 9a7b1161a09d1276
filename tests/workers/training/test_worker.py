"""The trainer's loop: tenants share passes, each run keeps its order, slow work runs beside the passes."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

import pytest
import torch

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.ledger_records import PendingOperation
from contracts.losses import LossName
from contracts.operations import (
    ForwardBackwardOutput,
    OperationKind,
    OptimStep,
    OptimStepped,
    SaveWeights,
    TrainingBatch,
    WeightsSaved,
)
from contracts.pass_report import PassReport
from engine.model.base import BaseModel
from engine.training.executors.group import GroupLost
from engine.training.pass_operation import PassPiece
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import DEADLINE, NewRig, busy_file_threads, undisturbed
from workers.training import worker as training_worker

STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int, lengths: tuple[int, ...] = (6, 9)) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, lengths)


async def test_pipelined_steps_of_several_tenants_share_every_pass(new_rig: NewRig) -> None:
    """Each tenant has queued three times ``forward_backward`` and ``optim_step``: three passes, not twelve."""
    rig = new_rig()
    async with rig.running():
        clients = await rig.clients("a", "b", "c", "d")
        async with rig.database.write() as transaction:
            requests = [
                (client, await client.accept(transaction, payload))
                for client in clients
                for number in range(3)
                for payload in (batch(number), STEP)
            ]
        for client, request in requests:
            await client.result(request)
    assert rig.counts.passes == 3
    assert (rig.counts.tenants, rig.counts.adapters, rig.counts.sequences) == (12, 12, 24)
    assert (rig.counts.tokens, rig.counts.optimizer_steps) == (3 * 4 * 15, 12)
    assert rig.counts.padded_tokens >= rig.counts.tokens
    assert min(rig.counts.base_seconds, rig.counts.low_rank_seconds, rig.counts.optimizer_seconds) > 0


async def test_every_pass_logs_what_it_served(new_rig: NewRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = new_rig()
    with caplog.at_level(logging.DEBUG, "telemetry.training"):
        async with rig.running():
            first, second = await rig.clients("a", "b")
            async with rig.database.write() as transaction:
                requests = [(client, await client.accept(transaction, batch(1))) for client in (first, second)]
            for client, request in requests:
                await client.result(request)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("pass ")]
    for part in (
        "tenants=2 ",
        "adapters=2 ",
        "sequences=4 ",
        "tokens=30 ",
        "padding=",
        "base_s=",
        "low_rank_s=",
        "loss_s=",
    ):
        assert part in line


async def test_operations_that_arrive_out_of_order_run_by_seq_id_beside_a_flood(
    new_rig: NewRig, base: BaseModel
) -> None:
    """A pass has room for the small later operation but not for all of the earlier one, which must still run first."""
    rig = new_rig(token_budget=64)
    earlier, later = batch(1, (16, 16, 16)), batch(2, (4,))
    async with rig.running():
        client, flood = await rig.clients("client", "flood")
        async with rig.database.write() as transaction:
            requests = [await client.accept(transaction, later, seq_id=2)]
            requests.append(await client.accept(transaction, earlier, seq_id=1))
            requests.append(await client.accept(transaction, STEP, seq_id=3))
            floods = [await flood.accept(transaction, batch(3, (4,) * 30)) for _ in range(3)]
        for request in requests:
            await client.result(request)
        for request in floods:
            assert isinstance(await flood.result(request), ForwardBackwardOutput)
        expected = undisturbed(base, client.lora, [earlier, later, STEP])
        assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)
        assert client.state().gradient is None


async def test_others_train_while_a_tenants_checkpoint_cannot_be_written(new_rig: NewRig) -> None:
    """Later operations of the saving run wait; another tenant's do not. The checkpoint holds the state at the save."""
    rig = new_rig()
    async with rig.running():
        saver, other = await rig.clients("saver", "other")
        await saver.do(batch(1))
        with busy_file_threads():
            saving = await saver.send(SaveWeights("held"))
            after = await saver.send(STEP)
            for number in range(3):
                await other.do(batch(number))
                assert isinstance(await other.do(STEP), OptimStepped)
            assert await saver.is_pending(saving)
            assert await saver.is_pending(after)
        assert isinstance(await saver.result(saving), WeightsSaved)
        await saver.result(after)


async def test_a_failed_operation_fails_alone_and_its_run_goes_on(new_rig: NewRig, base: BaseModel) -> None:
    """A datum that only the engine can refuse, queued between others of its run and beside another tenant's."""
    rig = new_rig()
    bad = make_batch(1, LossName.CROSS_ENTROPY, (3000,))
    async with rig.running():
        client, other = await rig.clients("client", "other")
        async with rig.database.write() as transaction:
            first = await client.accept(transaction, batch(1))
            failing = await client.accept(transaction, bad)
            last = await client.accept(transaction, batch(2))
            beside = await other.accept(transaction, batch(1))
        with pytest.raises(EngineFailure, match="data\\[0\\]"):
            await client.result(failing)
        for owner, request in ((client, first), (client, last), (other, beside)):
            assert isinstance(await owner.result(request), ForwardBackwardOutput)
        for owner, batches in ((client, [batch(1), batch(2)]), (other, [batch(1)])):
            gradient, expected = owner.state().gradient, undisturbed(base, owner.lora, list(batches)).gradient
            assert gradient is not None
            assert expected is not None
            assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())


async def test_a_forward_leaves_no_gradient(new_rig: NewRig) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await other.do(batch(1))
        assert isinstance(await client.do(batch(1), kind=OperationKind.FORWARD), ForwardBackwardOutput)
        assert client.state().gradient is None
        assert other.state().gradient is not None
        assert await client.do(STEP) == OptimStepped({"grad_norm:max": 0.0, "step:max": 1.0})


async def test_an_operation_is_not_failed_by_the_loss_of_the_trainers_group(
    new_rig: NewRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends instead; the operation stays for the next one."""
    rig = new_rig()

    def lose(_pieces: Sequence[PassPiece], *, slots: int) -> PassReport:
        raise GroupLost("a rank is gone")

    task = asyncio.create_task(rig.worker.run())
    (client,) = await rig.clients("a")
    monkeypatch.setattr(rig.trainer, "compute", lose)
    request = await client.send(batch(1))
    async with asyncio.timeout(DEADLINE):
        with pytest.raises(GroupLost):
            await task
    assert await client.is_pending(request)


async def test_no_adapter_keeps_a_step_that_is_told_to_have_failed(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joint step fails after it was applied; a tenant whose own step came before and after has lost nothing."""
    rig = new_rig()
    take = rig.trainer.optim_steps

    def fail_after(steps: Sequence[tuple[RunId, OptimStep]]) -> list[OptimStepped | WeftError]:
        take(steps)
        raise TypeError("nobody foresaw this")

    async with rig.running():
        clients = await rig.clients("a", "b")
        for client in clients:
            await client.do(batch(1))
            await client.do(STEP)
            await client.do(batch(2))
        monkeypatch.setattr(rig.trainer, "optim_steps", fail_after)
        async with rig.database.write() as transaction:
            requests = [(client, await client.accept(transaction, STEP)) for client in clients]
        for client, request in requests:
            with pytest.raises(EngineFailure, match="weft failed"):
                await client.result(request)
        monkeypatch.undo()
        for client in clients:
            await client.do(STEP)
            expected = undisturbed(base, client.lora, [batch(1), STEP, batch(2), STEP])
            assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)


async def test_an_operation_that_commits_after_a_later_one_does_not_wait_for_the_sweep(
    new_rig: NewRig, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_worker, "SWEEP_SECONDS", 120.0)
    rig = new_rig(url=migrated_postgres_url)
    async with rig.running():
        late, other = await rig.clients("late", "other")
        async with rig.database.write() as transaction:
            # Has its position, and is not seen before the block ends.
            request = await late.accept(transaction, STEP)
            for _ in range(3):
                assert isinstance(await other.do(STEP), OptimStepped)
        began = monotonic()
        assert isinstance(await late.result(request), OptimStepped)
        assert monotonic() - began < 60


async def test_what_waits_behind_a_hole_is_not_read_again_for_each_step_and_each_new_model_of_others(
    new_rig: NewRig, migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, steps, models = 200, 4, 8
    rig = new_rig(url=migrated_postgres_url)
    read: Counter[RunId] = Counter()

    def counted(call: Callable[..., Awaitable[list[PendingOperation]]]) -> Callable[..., Any]:
        async def count(*arguments: Any, **options: Any) -> list[PendingOperation]:
            found = await call(*arguments, **options)
            read.update(one.run for one in found)
            return found

        return count

    async with rig.running():
        flood, neighbour = await rig.clients("flood", "neighbour")
        async with rig.database.write() as transaction:
            waits = [await flood.accept(transaction, STEP, seq_id=number + 2) for number in range(waiting)]
        await neighbour.do(STEP)
        monkeypatch.setattr(rig.ledger, "pending_training", counted(rig.ledger.pending_training))
        monkeypatch.setattr(rig.ledger, "pending_of_runs", counted(rig.ledger.pending_of_runs))
        for _ in range(steps):
            assert isinstance(await neighbour.do(STEP), OptimStepped)
        for number in range(models):
            made = await rig.model(neighbour.tenant, neighbour.session, neighbour.lora, 1 + number)
            await made.result(made.created)
        assert read[neighbour.run] >= steps
        # A sweep reads everything: there may be one, or a few where the machine is slow.
        assert read[flood.run] <= (steps + models) / 2 * waiting
        assert isinstance(await flood.do(STEP), OptimStepped), "the missing one"
        assert isinstance(await flood.result(waits[-1]), OptimStepped), "one that waited for it"
