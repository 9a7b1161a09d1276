"""A COMMIT whose answer is lost: PostgreSQL has recorded the step, the trainer does not know. The step takes effect once."""

import asyncio
import copy

import pytest
import torch
from sqlalchemy.engine import make_url

from contracts.ids import RequestId
from contracts.ledger_records import ReadyOperation
from contracts.losses import LossName
from contracts.operations import OptimStep, OptimStepped, TrainingBatch
from engine.model.base import BaseModel
from ledger.wakeups import operation_topic
from testing.commit_proxy import CommitProxy
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed
from workers.training.adapter_restorer import RestoredAdapter

STEP = OptimStep(learning_rate=1e-3)


def batch(seed: int) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, (6, 9))


BEFORE: list[TrainingBatch | OptimStep] = [batch(1), STEP, batch(2)]
AFTER: list[TrainingBatch | OptimStep] = [STEP, batch(3), STEP, batch(4)]


@pytest.fixture(autouse=True)
def short_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep often: a dropped run comes back with the next sweep."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.05)


async def trained(rig: Rig) -> tuple[list[Client], dict[str, list[RequestId]]]:
    """Train two tenants, end the worker, and accept more of their operations, which wait."""
    async with rig.running():
        clients = await rig.clients("client", "other")
        for client in clients:
            for operation in BEFORE:
                await client.do(operation)
    return clients, {client.run: [await client.send(operation) for operation in AFTER] for client in clients}


def restore_after_the_commit(rig: Rig, proxy: CommitProxy) -> None:
    """Let the held COMMIT through when the run's lane has been read and its adapter is about to be."""
    restore = rig.residency._restorer.restore

    async def late(operation: ReadyOperation) -> RestoredAdapter:
        if proxy.lost.is_set():
            await asyncio.to_thread(proxy.let_commit)
        return await restore(operation)

    rig.residency._restorer.restore = late  # type: ignore[method-assign]


@pytest.mark.parametrize("commits_late", [False, True])
async def test_a_step_whose_commit_was_not_answered_takes_effect_once(
    new_rig: NewRig, base: BaseModel, migrated_postgres_url: str, commits_late: bool
) -> None:
    """Both tenants' steps follow in the same rounds. Late: the lane is read before the commit, the adapter after it."""
    (client, other), requests = await trained(new_rig(url=migrated_postgres_url))
    server = make_url(migrated_postgres_url)
    lost = requests[client.run][0]
    with CommitProxy(server.host or "", server.port or 5432, lost, holds=commits_late) as proxy:
        url = server.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        rig = new_rig(url=url)
        if commits_late:
            restore_after_the_commit(rig, proxy)
        async with rig.running():
            with rig.ledger.wakeups.listen(operation_topic(lost)) as told:
                for one in (client, other):
                    one.rig = rig
                    await one.result(requests[one.run][-1])
                    assert isinstance(await one.result(requests[one.run][0]), OptimStepped)
                assert told.is_set(), "a client that waits for it need not wait for its own next look"
            assert proxy.lost.is_set()
            for one in (client, other):
                expected = undisturbed(base, one.lora, [*BEFORE, *AFTER])
                for ours, theirs in (
                    (one.state().weights.vector, expected.weights.vector),
                    (one.state().gradient, expected.gradient),
                ):
                    assert ours is not None
                    assert theirs is not None
                    assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())
                step = one.state().optimizer
                assert step is not None
                assert step.step == 3
        await rig.database.close()


async def test_an_adapter_that_is_behind_the_ledger_is_rebuilt_before_it_goes_on(
    new_rig: NewRig, base: BaseModel
) -> None:
    """A run is restored to before its last step, as by a read before that step's commit. A neighbour goes on."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        for operation in BEFORE:
            await client.do(operation)
        earlier = copy.deepcopy(client.state())
        await client.do(STEP)
        rig.trainer.put(client.run, earlier)
        rig.residency._residents[client.run].applied_seq_id -= 1
        for one in (client, other):
            await one.do(batch(3))
            await one.do(STEP)
        expected = undisturbed(base, client.lora, [*BEFORE, STEP, batch(3), STEP]).weights.vector
        assert torch.allclose(client.state().weights.vector, expected, rtol=1e-5, atol=1e-6)
