"""Training operations that are cancelled while a trainer has them."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from contracts.errors import Cancelled, EngineFailure
from contracts.losses import LossName
from contracts.operations import OptimStep, TrainingBatch
from engine.model.base import BaseModel
from ledger.cancellation import OfOperation
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import NewRig, undisturbed

STEP = OptimStep(learning_rate=1e-3)
CANCEL_SECONDS = 60.0


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


async def test_a_run_trains_on_as_if_an_operation_cancelled_in_its_pass_had_never_been(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is held while it computes two tenants' batches; one of them is cancelled meanwhile."""
    rig = new_rig()
    in_pass, gate = asyncio.Event(), threading.Event()
    loop, compute = asyncio.get_running_loop(), rig.trainer.compute

    def held(*given: Any, **named: Any) -> Any:
        loop.call_soon_threadsafe(in_pass.set)
        assert gate.wait(CANCEL_SECONDS)
        return compute(*given, **named)

    async with rig.running():
        client, other = await rig.clients("client", "other")
        monkeypatch.setattr(rig.trainer, "compute", held)
        async with rig.database.write() as transaction:
            cancelled = await client.accept(transaction, batch(1))
            kept = [await client.accept(transaction, payload) for payload in (batch(2), STEP)]
            beside = [await other.accept(transaction, payload) for payload in (batch(3), STEP)]
        async with asyncio.timeout(CANCEL_SECONDS):
            await in_pass.wait()
            async with rig.database.write() as transaction:
                await rig.ledger.cancel(transaction, OfOperation(cancelled), Cancelled("cancelled by the test"))
            # Answered although the pass goes on.
            with pytest.raises(EngineFailure, match="cancelled by the test"):
                await client.result(cancelled)
            gate.set()
            for owner, request in [*((client, one) for one in kept), *((other, one) for one in beside)]:
                await owner.result(request)
        for owner, done in ((client, [batch(2), STEP]), (other, [batch(3), STEP])):
            expected = undisturbed(base, owner.lora, list(done))
            assert torch.allclose(owner.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)
