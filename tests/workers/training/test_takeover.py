"""Runs that are rebuilt: their replays are ordinary work, fused with others' and charged to their tenants."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

import pytest
from sqlalchemy import func, select, update

from contracts.errors import EngineFailure, InvalidRequest
from contracts.ids import RequestId
from contracts.ledger_records import ReadyOperation
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LoadWeights, OptimStep, OptimStepped, SaveWeights, TrainingBatch
from engine.model.base import BaseModel
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass
from ledger.requeue import requeue_operation
from store.tables import Operation, OperationResult, Run
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import Client, NewRig, Rig, undisturbed
from workers.training.lanes import Lane, Rebuild

STEP = OptimStep(learning_rate=1e-3)
MOST_ATTEMPTS = 3


def batch(seed: int, lengths: tuple[int, ...] = (16, 16)) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, lengths)


WORK: list[TrainingBatch | OptimStep] = [batch(1), batch(2), STEP, batch(3), STEP, batch(4), STEP]


async def train(clients: Sequence[Client], work: Sequence[TrainingBatch | OptimStep] = WORK) -> list[RequestId]:
    """Have the work of each client done, and return the requests."""
    requests = []
    async with clients[0].rig.database.write() as transaction:
        for client in clients:
            requests += [(client, await client.accept(transaction, one)) for one in work]
    for client, request in requests:
        await client.result(request)
    return [request for _, request in requests]


def assert_is(client: Client, base: BaseModel, work: list[TrainingBatch | OptimStep]) -> None:
    """Assert that the adapter's weights are those of the operations, each once."""
    expected, found = undisturbed(base, client.lora, work), client.state()
    assert float((found.weights.vector - expected.weights.vector).norm()) <= 1e-5 * float(
        expected.weights.vector.norm()
    )
    assert found.optimizer is not None
    assert expected.optimizer is not None
    assert found.optimizer.step == expected.optimizer.step


def load(client: Client, name: str) -> LoadWeights:
    """Return a load of a checkpoint of the client, optimiser state included."""
    return LoadWeights(f"tinker://{client.run}/weights/{name}", optimizer=True, creates=False)


async def rows(rig: Rig) -> dict[str, tuple[str, str | None, int]]:
    """Return state, end and tokens of every operation, and the number of results."""
    async with rig.database.read() as session:
        found = await session.execute(select(Operation.id, Operation.state, Operation.finished_at, Operation.tokens))
        results = await session.scalar(select(func.count()).select_from(OperationResult))
        return {"results": ("", None, results or 0)} | {row.id: (row.state, str(row[2]), row.tokens) for row in found}


class Passes:
    """A trainer's ``compute`` that notes the runs of each pass, and whether an operation of ``beside`` waits meanwhile."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, beside: Client | None = None) -> None:
        self.runs: list[set[str]] = []
        self.waits: list[int] = []
        """Passes that began while an operation of ``beside`` that could have been in them waited, for each operation."""
        self._rig, self._beside, self._waited = rig, beside, 0
        self._seen: dict[int, object] = {}
        """Operations of ``beside`` that were in a pass, kept so that no other gets the number of one."""
        self._compute = rig.trainer.compute
        monkeypatch.setattr(rig.trainer, "compute", self)

    def __call__(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        runs = {str(piece.operation.run) for piece in pieces}
        self.runs.append(runs)
        if self._beside is not None:
            lane = self._rig.worker._lanes.get(self._beside.run)
            mine = {id(piece.operation): piece.operation for piece in pieces if piece.operation.run == self._beside.run}
            if mine.keys() - self._seen.keys():
                self._seen |= mine
                self.waits.append(self._waited)
                self._waited = 0
            elif lane is not None and lane.head is not None and not lane.started:
                self._waited += 1
        return self._compute(pieces, slots=slots)


@asynccontextmanager
async def together(rig: Rig, monkeypatch: pytest.MonkeyPatch, runs: int) -> AsyncIterator[None]:
    """Have the adapters of so many runs come into memory at the same moment."""
    bring_in, barrier = rig.residency.bring_in, asyncio.Barrier(runs)

    async def wait(operation: ReadyOperation) -> Rebuild | None:
        found = await bring_in(operation)
        await barrier.wait()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(rig.residency, "bring_in", wait)
        yield


async def test_a_neighbour_of_a_take_over_waits_for_few_passes_however_many_runs_are_replayed(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve runs lose their memory at once, of more passes than the neighbour may wait for."""
    work = WORK * 4
    rig = new_rig()
    async with rig.running():
        neighbour, *lost = await rig.clients("neighbour", *(f"lost{number}" for number in range(12)))
        await train(lost, work)
        await neighbour.do(batch(1))
        before = await rows(rig)
        for client in lost:
            rig.worker.outcomes.drop(client.run)
        passes = Passes(rig, monkeypatch, neighbour)
        async with rig.database.write() as transaction:
            requests = [(client, await client.accept(transaction, STEP)) for client in lost]
        done, replayed = 0, asyncio.gather(*(client.result(request) for client, request in requests))
        while not replayed.done():
            assert isinstance(await neighbour.do(batch(2)), ForwardBackwardOutput)
            done += 1
        assert all(isinstance(result, OptimStepped) for result in await replayed)
        for client in lost[::4]:
            assert_is(client, base, [*work, STEP])
        after = await rows(rig)
    assert {one: after[one] for one in before if one != "results"} == {
        one: row for one, row in before.items() if one != "results"
    }
    assert after["results"][2] == len(after) - 1, "each operation has one result"
    assert len(passes.waits) == done
    assert median(passes.waits) <= 2
    assert max(passes.waits) <= 4


async def test_replays_of_several_tenants_share_passes(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig()
    async with rig.running():
        lost = await rig.clients("first", "second", "third")
        await train(lost)
        passes = Passes(rig, monkeypatch)
        for client in lost:
            rig.worker.outcomes.drop(client.run)
        async with together(rig, monkeypatch, len(lost)):
            async with rig.database.write() as transaction:
                requests = [(client, await client.accept(transaction, STEP)) for client in lost]
            for client, request in requests:
                await client.result(request)
        for client in lost:
            assert_is(client, base, [*WORK, STEP])
    replayed = sum(isinstance(one, TrainingBatch) for one in WORK)
    assert sum(len(runs) for runs in passes.runs) >= len(lost) * (replayed - 1)
    assert sum(len(runs) == len(lost) for runs in passes.runs) >= replayed - 2


async def test_what_comes_after_a_replay_waits_for_all_of_it(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between what is replayed lie operations without effect, and ones that have failed."""
    rig = new_rig(token_budget=64)
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await train([client, other])
        await client.do(SaveWeights("kept"))
        with pytest.raises(EngineFailure):
            await client.do(load(client, "missing"))
        await train([client], [batch(6), batch(7), STEP])
        with pytest.raises(EngineFailure):
            await client.do(load(client, "missing"))
        await client.do(load(client, "kept"))
        await train([client], [batch(8), batch(9, (16,) * 9)])
        await rig.residency._snapshots.finished(client.run)
        async with rig.database.write() as transaction:
            await transaction.execute(
                update(Run).where(Run.id == client.run).values(snapshot_seq_id=-1, snapshot_dir=None)
            )
        for one in (client, other):
            rig.worker.outcomes.drop(one.run)
        passes = Passes(rig, monkeypatch)
        async with rig.database.write() as transaction:
            requests = [await client.accept(transaction, one) for one in (batch(10), STEP)]
            await other.accept(transaction, STEP)
        for request in requests:
            await client.result(request)
        assert_is(client, base, [*WORK, batch(8), batch(9, (16,) * 9), batch(10), STEP])
    assert sum(client.run in runs for runs in passes.runs) >= 8


async def test_an_adapter_that_leaves_amid_its_replay_goes_on_where_it_was(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is paged out between two replays, and its snapshot covers what was applied."""
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        await train([client, other])
        for one in (client, other):
            rig.worker.outcomes.drop(one.run)
        finish, left = rig.worker.outcomes.complete_replay, []

        def leaves(lane: Lane, replay: ReadyOperation, failure: Exception | None) -> None:
            finish(lane, replay, failure)  # type: ignore[arg-type]
            if lane.run == client.run and len(left) < 2 and not lane.started and lane.rebuild is not None:
                left.append(replay.seq_id)
                rig.residency.page_out(lane.run)

        monkeypatch.setattr(rig.worker.outcomes, "complete_replay", leaves)
        requests = [(one, await one.send(STEP)) for one in (client, other)]
        for one, request in requests:
            await one.result(request)
            assert_is(one, base, [*WORK, STEP])
    assert len(left) == 2


async def test_a_done_operation_that_kills_its_replays_is_named_and_can_be_requeued(
    new_rig: NewRig, base: BaseModel
) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        done = await train([client])
        await train([other])
        async with rig.database.write() as transaction:
            for request in done[:2]:
                with pytest.raises(InvalidRequest, match="has ended already"):
                    await requeue_operation(transaction, request)
            await transaction.execute(update(Operation).where(Operation.id == done[1]).values(attempts=MOST_ATTEMPTS))
        for one in (client, other):
            rig.worker.outcomes.drop(one.run)
        assert isinstance(await other.do(STEP), OptimStepped)
        for _ in range(2):
            with pytest.raises(
                EngineFailure, match=rf"could not be restored: operation 2 .*{done[1]}.*load a checkpoint"
            ):
                await client.do(STEP)
        before = await rows(rig)
        async with rig.database.write() as transaction:
            await requeue_operation(transaction, done[1])
        assert await rows(rig) == before
        assert isinstance(await client.do(STEP), OptimStepped)
        assert_is(client, base, [*WORK, STEP])
        assert_is(other, base, [*WORK, STEP])


async def test_a_suspect_is_replayed_alone(new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = new_rig()
    async with rig.running():
        client, other = await rig.clients("client", "other")
        done = await train([client, other])
        async with rig.database.write() as transaction:
            await transaction.execute(update(Operation).where(Operation.id == done[0]).values(attempts=1))
        for one in (client, other):
            rig.worker.outcomes.drop(one.run)
        passes = Passes(rig, monkeypatch)
        async with together(rig, monkeypatch, 2):
            async with rig.database.write() as transaction:
                requests = [(one, await one.accept(transaction, STEP)) for one in (client, other)]
            for one, request in requests:
                await one.result(request)
        assert next(runs for runs in passes.runs if client.run in runs) == {client.run}
        for one in (client, other):
            assert_is(one, base, [*WORK, STEP])
