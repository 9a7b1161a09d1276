"""Micro-batches computed beside each other: the numbers are those of one after another, run after run."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput
from engine.model.base import BaseModel
from engine.training.trainer import PassOperation, Trainer
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, gradients_of, make_batch, randomise, settings

LENGTHS = (128, 120, 100, 128, 90, 128)
"""Enough for a micro-batch on each of two threads."""
DEADLINE_SECONDS = 60.0


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Have torch believe in that many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def trained(base: BaseModel, runs: tuple[RunId, ...] = (RUN, NEIGHBOUR)) -> tuple[Trainer, list[ForwardBackwardOutput]]:
    """A trainer whose runs, of different ranks, have had one operation each in one pass."""
    trainer = Trainer(base)
    for run, rank in ((RUN, 8), (NEIGHBOUR, 3)):
        trainer.create(run, settings(rank=rank))
        randomise(trainer, run, rank)
    losses = {RUN: LossName.PPO, NEIGHBOUR: LossName.CROSS_ENTROPY}
    outcomes = trainer.run_pass([backward(run, make_batch(len(run), losses[run], LENGTHS)) for run in runs])
    assert all(isinstance(outcome, ForwardBackwardOutput) for outcome in outcomes)
    return trainer, [outcome for outcome in outcomes if isinstance(outcome, ForwardBackwardOutput)]


@pytest.mark.usefixtures("threads")
def test_a_pass_on_several_threads_is_equal_bit_for_bit_each_time(base: BaseModel) -> None:
    """Sums are taken in the order of the micro-batches, whichever ends first."""
    first, outcomes = trained(base)
    for _ in range(5):
        again, repeated = trained(base)
        for run in (RUN, NEIGHBOUR):
            assert all(map(torch.equal, gradients_of(first, run), gradients_of(again, run)))
        for ours, theirs in zip(outcomes, repeated, strict=True):
            assert ours.metrics == theirs.metrics


def test_a_pass_on_several_threads_gives_the_numbers_of_one(base: BaseModel, threads: int) -> None:
    several, _ = trained(base)
    torch.set_num_threads(1)
    alone, _ = trained(base)
    torch.set_num_threads(threads)
    for run in (RUN, NEIGHBOUR):
        for ours, theirs in zip(gradients_of(several, run), gradients_of(alone, run), strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_a_micro_batch_alone_leaves_a_core_to_the_rest_of_the_service(base: BaseModel, threads: int) -> None:
    """The neighbour's micro-batches, as many as there are cores, take all."""
    trainer, seen = Trainer(base), []
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings(rank=4))
    noted = base.model.get_input_embeddings().register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        for run, lengths, wanted in ((RUN, LENGTHS[:1], [threads - 1]), (NEIGHBOUR, (256,) * threads, [1] * threads)):
            operation = PassOperation(run, make_batch(1, LossName.CROSS_ENTROPY, lengths), True)
            trainer.compute([operation.next_piece(len(lengths))], slots=threads)
            assert seen == wanted
            assert torch.get_num_threads() == threads, "threads that start from now on would have another number"
            seen.clear()
    finally:
        noted.remove()


def pass_on(trainer: Trainer, slots: int) -> list[PassOperation]:
    """Both tenants' operations, computed on ``slots`` slots and noted, but not accumulated."""
    losses = {RUN: LossName.PPO, NEIGHBOUR: LossName.CROSS_ENTROPY}
    operations = [PassOperation(run, make_batch(1, loss, LENGTHS), True) for run, loss in losses.items()]
    computed = trainer.compute([one.next_piece(len(LENGTHS)) for one in operations], slots=slots)
    for piece, result in zip(computed.pieces, computed.results, strict=True):
        piece.operation.note(piece, result)
    return operations


@pytest.mark.parametrize("slots", [1, 2])
def test_passes_beside_each_other_give_the_numbers_of_a_pass_alone(base: BaseModel, threads: int, slots: int) -> None:
    """Equal bit for bit: a pass on a part of the cores does not depend on what the other cores compute."""
    trainer, _ = trained(base)
    at_once = Barrier(threads)

    def repeat() -> list[list[PassOperation]]:
        at_once.wait(DEADLINE_SECONDS)
        return [pass_on(trainer, slots) for _ in range(3)]

    with ThreadPoolExecutor(threads + 1) as executor:
        expected = executor.submit(pass_on, trainer, slots).result(DEADLINE_SECONDS)
        passes = [executor.submit(repeat) for _ in range(threads)]
        found = [operations for one in passes for operations in one.result(DEADLINE_SECONDS)]
    for operations in found:
        for ours, theirs in zip(operations, expected, strict=True):
            assert ours.outcome is None
            assert ours.gradient is not None
            assert theirs.gradient is not None
            assert ours.gradient.equal(theirs.gradient)
            assert ours.loss == theirs.loss
            assert all((a == b).all() for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))


@pytest.mark.usefixtures("threads")
def test_a_failure_on_one_thread_fails_its_member_alone(base: BaseModel) -> None:
    """One tenant's micro-batches cannot be computed: the neighbour's numbers are those it has alone."""
    expected, _ = trained(base, (NEIGHBOUR,))
    trainer = Trainer(base)
    for run, rank in ((RUN, 8), (NEIGHBOUR, 3)):
        trainer.create(run, settings(rank=rank))
        randomise(trainer, run, rank)
    mine = make_batch(1, LossName.PPO, (31,))
    mine.data[0].tokens[:] = 7

    def fail(_module: object, _inputs: object, named: dict[str, torch.Tensor]) -> None:
        if bool((named["input_ids"][:, :31] == 7).all(dim=1).any()):
            raise torch.OutOfMemoryError

    watching = base.model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        neighbour = make_batch(len(NEIGHBOUR), LossName.CROSS_ENTROPY, LENGTHS)
        failed, worked = trainer.run_pass([backward(RUN, mine), backward(NEIGHBOUR, neighbour)])
    finally:
        watching.remove()
    assert isinstance(failed, WeftError)
    assert isinstance(failed, EngineFailure)
    assert isinstance(worked, ForwardBackwardOutput)
    for ours, theirs in zip(gradients_of(trainer, NEIGHBOUR), gradients_of(expected, NEIGHBOUR), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
