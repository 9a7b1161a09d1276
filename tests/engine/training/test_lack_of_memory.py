"""A device whose memory ends: sequences that fit by themselves are computed, one that does not fails alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from contracts.errors import OutOfMemory
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput
from engine.model.base import BaseModel
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
