"""Passes beside each other: every core has one, operations end in order, and a dropped run's pass changes nothing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Event, Lock

import pytest
import torch

from contracts.errors import EngineFailure
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, TrainingBatch
from engine.model.base import BaseModel
from engine.training.pass_operation import PassPiece
from engine.training.trainer import ComputedPass
from tests.engine.training.conftest import make_batch
from tests.workers.training.conftest import DEADLINE, Client, NewRig, Rig, undisturbed

STEP = OptimStep(learning_rate=1e-3)
SLOTS = 2
Compute = Callable[..., ComputedPass]


def batch(seed: int, lengths: tuple[int, ...]) -> TrainingBatch:
    """Return a batch of random sequences."""
    return make_batch(seed, LossName.CROSS_ENTROPY, lengths)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots, on any machine."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: SLOTS)


class Watched:
    """A trainer's ``compute`` that counts the calls at the same time.

    It holds the first pass that ``holds`` names, which then fails with ``failure``.
    """

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, holds: Callable[[Sequence[PassPiece]], bool]) -> None:
        self.most = 0
        self.held, self.release = Event(), Event()
        self._now, self._lock = 0, Lock()
        self._compute: Compute = rig.trainer.compute
        self._holds = holds
        self.failure: Exception | None = None
        self.sizes: set[tuple[RunId, int]] = set()
        """Runs and sizes of the operations of which a part was computed."""
        monkeypatch.setattr(rig.trainer, "compute", self)

    def __call__(self, pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            if self._holds(pieces) and not self.held.is_set():
                computed = self._compute(pieces, slots=slots)
                self.held.set()
                assert self.release.wait(DEADLINE)
                if self.failure is not None:
                    raise self.failure
                return computed
            computed = self._compute(pieces, slots=slots)
            self.sizes |= _sizes(pieces)
            return computed
        finally:
            with self._lock:
                self._now -= 1


def _sizes(pieces: Sequence[PassPiece]) -> set[tuple[RunId, int]]:
    return {(piece.operation.run, len(piece.operation.batch.data)) for piece in pieces}


def first_of(client: Client) -> Callable[[Sequence[PassPiece]], bool]:
    """Return a test for passes that hold the first piece of an operation of the client."""
    return lambda pieces: any(piece.operation.run == client.run and piece.first == 0 for piece in pieces)


def assert_equals(client: Client, base: BaseModel, operations: list[TrainingBatch | OptimStep]) -> None:
    """Assert that the gradient is that of the operations one after another, within 1e-5 relative to its norm."""
    gradient, expected = client.state().gradient, undisturbed(base, client.lora, operations).gradient
    assert gradient is not None
    assert expected is not None
    assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())


async def test_one_operation_larger_than_a_slot_has_every_core(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig(token_budget=64)
    large, small = batch(1, (16,) * 12), batch(2, (8, 9))
    async with rig.running():
        flood, light = await rig.clients("flood", "light")
        watched = Watched(rig, monkeypatch, first_of(flood))
        sent = await flood.send(large)
        assert await asyncio.to_thread(watched.held.wait, DEADLINE)
        # Its first piece is held back; the rest of it, and the other tenant, go on.
        assert isinstance(await light.do(small), ForwardBackwardOutput)
        assert await flood.is_pending(sent)
        watched.release.set()
        output = await flood.result(sent)
        assert isinstance(output, ForwardBackwardOutput)
        assert [len(one) for one in output.logprobs] == [16] * 12
        assert watched.most == SLOTS
        assert_equals(flood, base, [large])
        assert_equals(light, base, [small])


async def test_an_operation_that_is_computed_first_ends_after_those_before_it(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = new_rig(token_budget=64)
    first, second, beside = batch(1, (16,) * 6), batch(2, (16, 16)), batch(3, (16, 16))
    async with rig.running():
        client, other = await rig.clients("client", "other")
        watched = Watched(rig, monkeypatch, first_of(client))
        async with rig.database.write() as transaction:
            requests = [await client.accept(transaction, payload) for payload in (first, second, STEP)]
        assert await asyncio.to_thread(watched.held.wait, DEADLINE)
        # By then all of the client's that can be computed has been.
        for _ in range(3):
            assert isinstance(await other.do(beside), ForwardBackwardOutput)
        assert [await client.is_pending(request) for request in requests] == [True] * 3
        assert client.state().gradient is None
        watched.release.set()
        for request in requests:
            await client.result(request)
        expected = undisturbed(base, client.lora, [first, second, STEP])
        assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)
        assert_equals(other, base, [beside] * 3)


async def test_an_operation_that_waits_for_one_whose_pass_fails_ends_after_it(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one is computed already: nothing else would come by which it ends."""
    rig = new_rig(token_budget=64)
    # Small enough that the later one is read ahead, and so large that the first one is in two passes.
    first, second, beside = batch(1, (16, 16, 16)), batch(2, (16, 16)), batch(3, (16, 16))
    async with rig.running():
        client, other = await rig.clients("client", "other")
        watched = Watched(rig, monkeypatch, lambda pieces: _sizes(pieces) == {(client.run, len(first.data))})
        watched.failure = TypeError("nobody foresaw this")
        async with rig.database.write() as transaction:
            requests = [await client.accept(transaction, payload) for payload in (first, second, STEP)]
        assert await asyncio.to_thread(watched.held.wait, DEADLINE)
        rounds = 0
        while (client.run, len(second.data)) not in watched.sizes:
            assert isinstance(await other.do(beside), ForwardBackwardOutput)
            rounds += 1
        # Noted by the time at which a later pass has ended.
        assert isinstance(await other.do(beside), ForwardBackwardOutput)
        assert [await client.is_pending(request) for request in requests] == [True] * 3
        watched.release.set()
        with pytest.raises(EngineFailure, match="weft failed"):
            await client.result(requests[0])
        for request in requests[1:]:
            await client.result(request)
        expected = undisturbed(base, client.lora, [second, STEP])
        assert torch.allclose(client.state().weights.vector, expected.weights.vector, rtol=1e-5, atol=1e-6)
        assert_equals(other, base, [beside] * (rounds + 1))


async def test_a_pass_under_way_does_not_reach_a_run_that_was_rebuilt_meanwhile(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's operation is computed again from the ledger: once, not twice."""
    monkeypatch.setattr("workers.training.worker.SWEEP_SECONDS", 0.05)
    rig = new_rig(token_budget=64)
    work, beside = batch(1, (16, 16)), batch(2, (16, 9))
    async with rig.running():
        client, other = await rig.clients("client", "other")
        flooding = await other.send(batch(3, (16,) * 40))
        watched = Watched(rig, monkeypatch, first_of(client))
        sent = await client.send(work)
        assert await asyncio.to_thread(watched.held.wait, DEADLINE)
        rig.worker.outcomes.drop(client.run)
        assert isinstance(await client.result(sent), ForwardBackwardOutput)
        watched.release.set()
        await other.result(flooding)
        assert isinstance(await other.do(beside), ForwardBackwardOutput)
        assert_equals(client, base, [work])
        assert_equals(other, base, [batch(3, (16,) * 40), beside])


async def test_a_neighbour_waits_for_a_pass_of_bounded_time_not_for_one_of_the_floods_size(
    new_rig: NewRig, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is told to take 10 ms a token. Beside a neighbour a flood has passes of 0.64 s, alone as many tokens as it can."""
    monkeypatch.setattr("engine.piece_size.COMPANY_SECONDS", float("inf"))
    rig = new_rig(token_budget=512, piece_time=timedelta(seconds=0.64))
    large, small = batch(1, (16,) * 64), batch(2, (8, 9))
    async with rig.running():
        flood, light = await rig.clients("flood", "light")
        passes: list[dict[RunId, int]] = []
        watched = Watched(rig, monkeypatch, lambda pieces: bool(passes) and first_of(flood)(pieces))

        def timed(pieces: Sequence[PassPiece], *, slots: int | None = None) -> ComputedPass:
            sequences = {piece.operation.run: piece.sequences for piece in pieces}
            computed = watched(pieces, slots=slots)
            passes.append(sequences)
            return replace(computed, report=replace(computed.report, seconds=computed.report.tokens * 0.01))

        monkeypatch.setattr(rig.trainer, "compute", timed)
        assert isinstance(await flood.do(large), ForwardBackwardOutput)
        assert max(one[flood.run] for one in passes) >= 16, "a tenant alone has less than a full pass"
        assert isinstance(await light.do(small), ForwardBackwardOutput)
        alone = len(passes)
        sent = await flood.send(large)
        assert await asyncio.to_thread(watched.held.wait, DEADLINE)
        # The flood's first pass is held back. In the other slot the neighbour waits for the pass under way, and has the next.
        before = len(passes)
        assert isinstance(await light.do(small), ForwardBackwardOutput)
        assert [light.run in one for one in passes[before:]].index(True) <= 2
        watched.release.set()
        assert isinstance(await flood.result(sent), ForwardBackwardOutput)
        cut = [one.get(flood.run, 0) for one in passes[alone:]]
        assert sum(cut) == 64
        assert max(cut) <= 4, "a pass beside a neighbour takes longer than it may"
        assert_equals(flood, base, [large, large])
        assert_equals(light, base, [small, small])
