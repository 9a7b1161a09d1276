"""Many runs that are rebuilt at once: few replay at a time, payloads are read as they are needed, a neighbour trains on."""

import pytest
import torch

from contracts.ids import RunId
from contracts.ledger_records import ReadyOperation
from contracts.losses import LossName
from contracts.operations import OptimStep, OptimStepped, TrainingBatch
from engine.model.base import BaseModel
from store.tables import Run
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import NewRig, undisturbed
from workers.training.adapter_restorer import MAX_REPLAYS_AT_ONCE

STEP = OptimStep(learning_rate=1e-3)
RUNS = 8
DONE: list[TrainingBatch | OptimStep] = [STEP] * 6


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


async def test_runs_that_are_taken_over_are_replayed_a_few_at_a_time_beside_a_neighbour(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight runs lose their memory at once. A neighbour's step ends before all of them are back."""
    rig = new_rig()
    restorer = rig.residency._restorer
    apply, read = restorer._apply_again, rig.ledger.operations_to_replay
    replaying: set[str] = set()
    most_replaying, most_read = 0, 0

    async def counted(run: Run, operation: ReadyOperation) -> None:
        nonlocal most_replaying
        replaying.add(run.id)
        most_replaying = max(most_replaying, len(replaying))
        try:
            await apply(run, operation)
        finally:
            replaying.discard(run.id)

    async def noted(session: object, run: RunId, **bounds: int) -> list[ReadyOperation]:
        nonlocal most_read
        found = await read(session, run, **bounds)  # type: ignore[arg-type]
        most_read = max(most_read, len(found))
        return found

    monkeypatch.setattr(restorer, "_apply_again", counted)
    monkeypatch.setattr(rig.ledger, "operations_to_replay", noted)
    async with rig.running():
        neighbour, *lost = await rig.clients("neighbour", *(f"lost{number}" for number in range(RUNS)))
        for client in lost:
            for operation in [batch(1), *DONE]:
                await client.do(operation)
        await neighbour.do(batch(1))
        for client in lost:
            rig.worker.outcomes.drop(client.run)
        requests = [(client, await client.send(STEP)) for client in lost]
        assert isinstance(await neighbour.do(STEP), OptimStepped)
        back = sum(client.run in rig.residency.residents() for client in lost)
        assert back < RUNS, "the neighbour has not waited for them"
        for client, request in requests:
            await client.result(request)
        for client in lost:
            expected = undisturbed(base, client.lora, [batch(1), *DONE, STEP]).weights.vector
            assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)
    assert most_replaying <= MAX_REPLAYS_AT_ONCE
    assert most_read < len(DONE)
