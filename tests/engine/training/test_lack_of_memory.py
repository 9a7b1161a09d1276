"""A device whose memory ends: sequences that fit by themselves are computed, one that does not fails alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from contracts.errors import OutOfMemory
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, OptimStep, OptimStepped
from engine.model.base import BaseModel
from engine.model.device import DeviceFailed
from engine.training.adamw import StepResult, StepTask, adamw_steps
from engine.training.pass_operation import PassOperation, PieceResult
from engine.training.trainer import Trainer
from tests.engine.training.conftest import NEIGHBOUR, RUN, backward, gradients_of, make_batch, randomise, settings

BUDGET = 4096
MOST = 512
"""Positions for which the device has memory."""
LENGTH = 128
ROWS = 16
_ERRORS: dict[str, Callable[[], Exception]] = {
    "accelerator": torch.OutOfMemoryError,
    "host": lambda: RuntimeError(
        "alloc_cpu.cpp:119 DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
    ),
    "python": MemoryError,
    "driver": lambda: torch.AcceleratorError("CUDA error: out of memory"),
    "driver API": lambda: RuntimeError("CUDA driver error: out of memory"),
    "cuBLAS handle": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    ),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@contextmanager
def small_device(base: BaseModel, error: Callable[[], Exception] = torch.OutOfMemoryError) -> Iterator[list[int]]:
    """Fail what has more than ``MOST`` positions; yield the positions of every try."""
    tried: list[int] = []

    def look(_module: object, _inputs: object, output: Tensor) -> None:
        tried.append(output.shape[0] * output.shape[1])
        if tried[-1] > MOST:
            raise error()

    hook = base.model.base_model.norm.register_forward_hook(look)
    try:
        yield tried
    finally:
        hook.remove()


def new_trainer(base: BaseModel) -> Trainer:
    trainer = Trainer(base, pass_token_budget=BUDGET)
    for run, seed in ((RUN, 1), (NEIGHBOUR, 2)):
        trainer.create(run, settings())
        randomise(trainer, run, seed)
    return trainer


@pytest.mark.parametrize("error", list(_ERRORS))
def test_sequences_that_fit_by_parts_are_computed_by_parts_and_the_bound_is_remembered(
    base: BaseModel, error: str
) -> None:
    mine, theirs = (make_batch(seed, LossName.PPO, (LENGTH,) * ROWS) for seed in (1, 2))
    roomy, small = new_trainer(base), new_trainer(base)
    roomy.run_pass([backward(RUN, mine), backward(NEIGHBOUR, theirs)])
    with small_device(base, _ERRORS[error]) as tried:
        for items in ([backward(RUN, mine)], [backward(NEIGHBOUR, theirs)]):
            assert all(isinstance(found, ForwardBackwardOutput) for found in small.run_pass(items))
            assert min(tried) <= MOST
            failed = [size for size in tried if size > MOST]
            tried.clear()
    assert not failed, "the second operation was not cut by what the first had learned"
    for run in (RUN, NEIGHBOUR):
        for ours, expected in zip(gradients_of(small, run), gradients_of(roomy, run), strict=True):
            assert float((ours - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_a_sequence_that_never_fits_fails_alone_after_few_tries(base: BaseModel) -> None:
    long, short = (make_batch(seed, LossName.PPO, lengths) for seed, lengths in ((1, (MOST + 1,) * 4), (2, (9, 5))))
    trainer = new_trainer(base)
    with small_device(base) as tried:
        failed, fine = trainer.run_pass([backward(RUN, long), backward(NEIGHBOUR, short)])
    assert isinstance(failed, OutOfMemory)
    assert isinstance(fine, ForwardBackwardOutput)
    assert trainer.state(RUN).gradient is None
    assert len(tried) <= 6
    assert trainer.memory.most is None, "one sequence that is too long bounds nobody's micro-batches"


@pytest.mark.parametrize("error", list(_ERRORS))
def test_results_that_cannot_be_noted_for_lack_of_memory_fail_their_own_operation_alone(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Nothing of the operation is kept: sent again, it counts once."""
    batch, add = make_batch(1, LossName.PPO, (9, 5)), PassOperation._add
    trainer, expected = new_trainer(base), new_trainer(base)

    def lacking(operation: PassOperation, result: PieceResult) -> None:
        if operation.run == RUN:
            raise _ERRORS[error]()
        add(operation, result)

    items = [backward(RUN, batch), backward(NEIGHBOUR, batch)]
    with monkeypatch.context() as patch:
        patch.setattr(PassOperation, "_add", lacking)
        failed, fine = trainer.run_pass(items)
    assert isinstance(failed, OutOfMemory)
    assert isinstance(fine, ForwardBackwardOutput)
    assert trainer.state(RUN).gradient is None
    trainer.run_pass(items[:1])
    expected.run_pass(items)
    for run in (RUN, NEIGHBOUR):
        for ours, theirs in zip(gradients_of(trainer, run), gradients_of(expected, run), strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_an_accelerators_error_while_results_are_noted_is_nobodys_failure(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(PassOperation, "_add", break_down)
    with pytest.raises(DeviceFailed):
        new_trainer(base).run_pass([backward(RUN, make_batch(1, LossName.PPO, (9, 5)))])


def test_a_step_without_memory_fails_alone_with_that_reason(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, trainer = make_batch(1, LossName.PPO, (9, 5)), new_trainer(base)
    trainer.run_pass([backward(run, batch) for run in (RUN, NEIGHBOUR)])

    def lacking(tasks: Sequence[StepTask]) -> list[StepResult]:
        if any(task.step.learning_rate == 0.5 for task in tasks):
            raise torch.OutOfMemoryError
        return adamw_steps(tasks)

    monkeypatch.setattr("engine.training.trainer.adamw_steps", lacking)
    failed, fine = trainer.optim_steps([(RUN, OptimStep(learning_rate=0.5)), (NEIGHBOUR, OptimStep())])
    assert isinstance(failed, OutOfMemory)
    assert isinstance(fine, OptimStepped)
    assert trainer.state(RUN).gradient is not None


def test_a_moment_without_any_memory_bounds_nothing(base: BaseModel) -> None:
    batch = make_batch(1, LossName.PPO, (LENGTH,) * ROWS)
    trainer = new_trainer(base)

    def fail(_module: object, _inputs: object) -> None:
        raise torch.OutOfMemoryError

    hook = base.model.base_model.register_forward_pre_hook(fail)
    try:
        outcomes = trainer.run_pass([backward(RUN, batch), backward(NEIGHBOUR, batch)])
    finally:
        hook.remove()
    assert [type(one) for one in outcomes] == [OutOfMemory, OutOfMemory]
    assert trainer.memory.most is None
    assert all(isinstance(one, ForwardBackwardOutput) for one in trainer.run_pass([backward(RUN, batch)]))
