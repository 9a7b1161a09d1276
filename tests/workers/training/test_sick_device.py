"""A sick device ends the trainer, not the tenants' operations: these stay pending, and the next trainer computes them."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest
import torch
from sqlalchemy import delete, func, select
from torch import Tensor

from cli.process import DEVICE_FAILED
from contracts.errors import EngineFailure
from contracts.ids import RequestId
from contracts.ledger_records import OperationState
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, OptimStepped, TrainingBatch
from engine.model.base import BaseModel
from engine.model.device import DeviceFailed, SelfTest
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass
from store.tables import Operation, Run, WorkerProcess
from tests.conftest import ROOT
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import BASE, Client, NewRig, Rig, undisturbed

STEP = OptimStep(learning_rate=1e-3)
LONG = 30.0
Compute = Callable[..., ComputedPass]


def batch(seed: int, lengths: tuple[int, ...] = (6, 9)) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, lengths)


async def count(rig: Rig, *which: object) -> int:
    """Return how many rows fulfil ``which``."""
    async with rig.database.read() as session:
        return await session.scalar(select(func.count()).where(*which)) or 0  # type: ignore[arg-type]


async def sent_together(*clients: Client) -> list[tuple[Client, RequestId]]:
    """Have a pass and a step of each client accepted at once."""
    async with clients[0].rig.database.write() as transaction:
        return [(one, await one.accept(transaction, payload)) for one in clients for payload in (batch(1), STEP)]


@asynccontextmanager
async def ending(rig: Rig) -> AsyncIterator[None]:
    """Run the worker; afterwards it must end because of its device, without a lease and without a run."""
    task = asyncio.create_task(rig.worker.run())
    yield
    async with asyncio.timeout(LONG):
        with pytest.raises(DeviceFailed):
            await task
    assert await count(rig, WorkerProcess.kind == "trainer") == 0
    assert await count(rig, Run.trainer_id.is_not(None)) == 0
    assert rig.data_folder.folders("in-hand") == []


async def assert_next_trainer_goes_on(new_rig: NewRig, base: BaseModel, sent: list[tuple[Client, RequestId]]) -> None:
    """No operation has failed, and a healthy trainer computes the pending ones, each once."""
    rig = new_rig(url=f"sqlite+aiosqlite:///{sent[0][0].rig.data_folder.path('weft.db')}")
    assert await count(rig, Operation.state == OperationState.PENDING) >= 2
    assert await count(rig, Operation.state == OperationState.FAILED) == 0
    async with rig.running():
        for client, _ in sent:
            client.rig = rig
        for client, request in sent:
            assert isinstance(await client.result(request), ForwardBackwardOutput | OptimStepped)
        for client in {id(one): one for one, _ in sent}.values():
            expected = undisturbed(base, client.lora, [batch(1), STEP])
            assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)


def break_down(*_: object, **__: object) -> NoReturn:
    """Fail as an accelerator does."""
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("where", ["a pass", "a step"])
async def test_an_accelerators_error_ends_the_trainer_and_nobodys_operation(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rig = new_rig()
    async with ending(rig):
        clients = await rig.clients("a", "b")
        if where == "a pass":
            monkeypatch.setattr(base, "hidden_states", break_down)
        else:
            monkeypatch.setattr("engine.training.trainer.adamw_steps", break_down)
        sent = await sent_together(*clients)
    assert await count(rig, Operation.attempts == 1) == 2
    monkeypatch.undo()
    await assert_next_trainer_goes_on(new_rig, base, sent)


async def test_a_device_that_fails_its_self_test_after_a_failed_pass_ends_the_trainer(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operation of the pass fails, in a way that says nothing about the device. Its numbers do."""
    rig = new_rig()
    logits = base.logits

    def fail(_tokens: Tensor) -> Tensor:
        raise RuntimeError("cuBLAS error")

    async with ending(rig):
        clients = await rig.clients("a", "b")
        monkeypatch.setattr(base, "hidden_states", fail)
        monkeypatch.setattr(base, "logits", lambda tokens: logits(tokens) + 1e3)
        sent = await sent_together(*clients)
    monkeypatch.undo()
    await assert_next_trainer_goes_on(new_rig, base, sent)


async def test_a_pass_without_progress_ends_the_trainer(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hangs is not waited for, also when the trainer was asked to end."""
    rig, release = new_rig(stall_limit=1), Event()
    compute: Compute = rig.trainer.compute
    begun = Event()

    def hang(pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        begun.set()
        assert release.wait(LONG)
        return compute(pieces, slots=slots)

    try:
        async with ending(rig):
            clients = await rig.clients("a", "b")
            monkeypatch.setattr(rig.trainer, "compute", hang)
            sent = await sent_together(*clients)
            assert await asyncio.to_thread(begun.wait, LONG)
            rig.worker.stop()
        await assert_next_trainer_goes_on(new_rig, base, sent)
    finally:
        release.set()


async def test_a_service_whose_device_hangs_ends_with_its_status(
    new_rig: NewRig, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The thread that hangs keeps no process alive. The work is pending for the next start."""
    rig = new_rig()
    clients = [await rig.client(name) for name in ("a", "b")]
    sent = await sent_together(*clients)
    command = [
        sys.executable,
        "-m",
        "tests.workers.training.hanging_service",
        str(tmp_path),
        f"{BASE}={tiny_model_dir}",
    ]
    ended = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=4 * LONG)
    assert ended.returncode == DEVICE_FAILED, ended.stderr[-4000:]
    assert "serve ends with status 75: a call to the device has made no progress" in ended.stderr
    for client, request in sent:
        assert await client.is_pending(request)
    assert await count(rig, Operation.attempts == 1) >= 1
    assert await count(rig, WorkerProcess.id.is_not(None)) == 0


async def test_a_trainer_without_progress_does_not_renew_its_lease(new_rig: NewRig, migrated_postgres_url: str) -> None:
    """A trainer that makes progress renews. PostgreSQL: a process that is alone with its database renews nothing."""
    stuck, working, release, begun = (
        new_rig(url=migrated_postgres_url, stall_limit=1),
        new_rig(url=migrated_postgres_url),
        Event(),
        Event(),
    )
    for rig in (stuck, working):
        await rig.worker.leases.look()
    stuck.compute.submit(lambda: (begun.set(), release.wait(LONG)))
    try:
        assert await asyncio.to_thread(begun.wait, LONG)
        assert await count(working, WorkerProcess.kind == "trainer") == 2
        async with working.database.write() as transaction:
            await transaction.execute(delete(WorkerProcess))
        async with asyncio.timeout(LONG):
            while stuck.compute.clock.longest() <= 1:
                await asyncio.to_thread(release.wait, 0.05)
            while await count(working, WorkerProcess.id == working.worker.leases.identity.id) == 0:
                await asyncio.to_thread(release.wait, 0.05)
                for rig in (stuck, working):
                    await rig.worker.leases.look()
        assert await count(working, WorkerProcess.id == stuck.worker.leases.identity.id) == 0
    finally:
        release.set()


async def test_one_operation_that_breaks_its_pass_fails_alone_on_a_healthy_device(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole pass fails in a way that nobody foresaw. The neighbours are computed without the culprit."""
    rig = new_rig()
    compute: Compute = rig.trainer.compute
    passes = itertools.count()
    async with rig.running():
        culprit, *neighbours = await rig.clients("culprit", "near", "far")

        def break_up(pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
            next(passes)
            if any(piece.operation.run == culprit.run for piece in pieces):
                raise TypeError("nobody foresaw this")
            return compute(pieces, slots=slots)

        monkeypatch.setattr(rig.trainer, "compute", break_up)
        async with rig.database.write() as transaction:
            bad = await culprit.accept(transaction, batch(1))
            good = [(one, await one.accept(transaction, batch(1))) for one in neighbours]
        with pytest.raises(EngineFailure, match="weft failed"):
            await culprit.result(bad)
        for one, request in good:
            assert isinstance(await one.result(request), ForwardBackwardOutput)
            gradient, expected = one.state().gradient, undisturbed(base, one.lora, [batch(1)]).gradient
            assert gradient is not None
            assert expected is not None
            assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())
        assert next(passes) == 4


@pytest.mark.parametrize("numbers", ["other", "not finite", "none"])
def test_a_self_test_finds_wrong_numbers(base: BaseModel, monkeypatch: pytest.MonkeyPatch, numbers: str) -> None:
    test, logits = SelfTest(base), base.logits
    test.check()

    def wrong(tokens: Tensor) -> Tensor:
        if numbers == "none":
            raise RuntimeError("CUDA error: device-side assert triggered")
        return logits(tokens) * (float("nan") if numbers == "not finite" else 1.5)

    monkeypatch.setattr(base, "logits", wrong)
    with pytest.raises(DeviceFailed):
        test.check()
