"""Dimuon steps against ``torch.optim.Muon`` in fp32, beside neighbours, and through every way a state is kept.

Tolerances: 1e-5 of the largest value for momenta; for a step's change 2^-5 of its norm, and 2^-3 of its largest value for one
weight. Both rules iterate in bfloat16, whose rounding is 2^-8, torch multiplies one matrix at a time, and processors differ.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.errors import InvalidRequest
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import OptimizerName, OptimStep, OptimStepped
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState, OptimizerState, largest_nbytes, read_state, write_state
from engine.training.checkpoint_files import read_checkpoint, write_checkpoint
from engine.training.trainer import Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    make_batch,
    matrices,
    randomise,
    settings,
)

LARGEST_ERROR, MEAN_ERROR = 2**-3, 2**-5
OTHER = RunId("third:train:0")
ADAMW = OptimStep(learning_rate=2e-3)


def dimuon(**settings: float) -> OptimStep:
    """A dimuon step."""
    return OptimStep(learning_rate=5e-3, optimizer=OptimizerName.DIMUON, **settings)  # type: ignore[arg-type]


def compute(trainer: Trainer, number: int, *runs: RunId) -> None:
    """Give each run a gradient."""
    trainer.run_pass([backward(run, make_batch(10 + number, LossName.CROSS_ENTROPY)) for run in runs])


def optimizer_of(trainer: Trainer, run: RunId) -> OptimizerState:
    """The run's optimizer state, after a step."""
    found = trainer.state(run).optimizer
    assert found is not None
    return found


def vectors(state: AdapterState) -> list[Tensor]:
    """The state's tensors, after a step."""
    assert state.optimizer is not None
    return [state.weights.vector, state.optimizer.exp_avg, state.optimizer.exp_avg_sq]


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_ten_steps_equal_torch_muon_and_adamw_at_the_head(trainer: Trainer, clip: float, head: bool) -> None:
    """The same gradients go into both; beside it a neighbour steps by AdamW."""
    trainer.create(RUN, settings(train_unembed=head))
    trainer.create(NEIGHBOUR, settings(seed=2))
    parameters = [tensor.detach().clone().requires_grad_() for tensor in matrices(trainer, RUN)]
    names = [name for name in trainer.state(RUN).weights.layout.names for _ in "AB"]
    outer = [one for one, name in zip(parameters, names, strict=True) if "lm_head" in name]
    inner = [one for one, name in zip(parameters, names, strict=True) if "lm_head" not in name]
    assert len(outer) == (2 if head else 0)
    muon = torch.optim.Muon(inner, lr=5e-3, weight_decay=0, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(outer, lr=5e-3, betas=(0.8, 0.95), eps=1e-12, weight_decay=0) if outer else None
    for number in range(10):
        compute(trainer, number, RUN, NEIGHBOUR)
        before = [tensor.clone() for tensor in matrices(trainer, RUN)]
        for parameter, gradient, start in zip(parameters, gradients_of(trainer, RUN), before, strict=True):
            parameter.data.copy_(start)
            parameter.grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf"))
        muon.step()
        if adamw is not None:
            adamw.step()
        beside, outcome = trainer.optim_steps([(NEIGHBOUR, ADAMW), (RUN, dimuon(beta1=0.8, grad_clip_norm=clip))])
        assert isinstance(beside, OptimStepped)
        assert isinstance(outcome, OptimStepped)
        assert outcome.metrics["grad_norm:max"] == pytest.approx(float(norm), rel=1e-5)
        momenta = matrices(trainer, RUN, optimizer_of(trainer, RUN).exp_avg)
        for parameter, start, after, ours in zip(parameters, before, matrices(trainer, RUN), momenta, strict=True):
            change = parameter.detach() - start
            assert_near(after - start, change, LARGEST_ERROR)
            error = torch.linalg.vector_norm(after - start - change)
            assert error <= MEAN_ERROR * torch.linalg.vector_norm(change)
            kind = "momentum_buffer" if any(parameter is one for one in inner) else "exp_avg"
            theirs = (muon.state if kind == "momentum_buffer" or adamw is None else adamw.state)[parameter][kind]
            assert_near(ours, theirs, 1e-5)


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Within ``tolerance`` of the largest value of the reference."""
    assert float((ours - theirs).abs().max()) <= tolerance * max(float(theirs.abs().max()), 1e-9)


def test_neighbours_change_no_bit_of_each_other(base: BaseModel) -> None:
    """AdamW's and dimuon's adapters, each alone and all together, given the same gradients."""
    steps = {RUN: dimuon(), OTHER: dimuon(beta1=0.5), NEIGHBOUR: ADAMW}
    alone, together = Trainer(base), Trainer(base)
    for seed, run in enumerate(steps):
        together.create(run, settings(seed=seed + 1))
        alone.create(run, settings(seed=seed + 1))
    for number in range(2):
        compute(together, number, *steps)
        for run, step in steps.items():
            alone.put(run, replace(alone.state(run), gradient=together.state(run).gradient))
            alone.optim_step(run, step)
        together.optim_steps(list(steps.items()))
    for run in steps:
        for one, other in zip(vectors(alone.state(run)), vectors(together.state(run)), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
@pytest.mark.parametrize("way", ["paged out", "checkpoint"])
def test_a_state_comes_back_bit_equal(trainer: Trainer, tmp_path: Path, way: str, head: bool) -> None:
    """The neighbour's AdamW state goes the same way."""
    for run, step in ((RUN, dimuon()), (NEIGHBOUR, ADAMW)):
        trainer.create(run, settings(train_unembed=head))
        randomise(trainer, run, 4)
        compute(trainer, 0, run)
        trainer.optim_step(run, step)
        state, folder = trainer.state(run), tmp_path / str(run).replace(":", "-")
        if way == "checkpoint":
            write_checkpoint(folder, trainer.base, state, optimizer=True)
            found = read_checkpoint(folder, trainer.base, optimizer=True)
        else:
            write_state(folder, trainer.base, state)
            found = read_state(folder, trainer.base)
        assert found.optimizer is not None
        assert (found.optimizer.name, found.optimizer.step) == (step.optimizer, 1)
        for one, other in zip(vectors(found), vectors(state), strict=True):
            assert torch.equal(one, other)


def test_a_state_takes_one_moment_and_the_heads_second(trainer: Trainer) -> None:
    for head in (True, False):
        trainer.create(RUN, settings(train_unembed=head))
        compute(trainer, 0, RUN)
        trainer.optim_step(RUN, dimuon())
        state = trainer.state(RUN)
        layout = state.weights.layout
        second = layout.head.stop - layout.head.start
        assert (second > 0) is head
        assert state.nbytes == 4 * (2 * layout.size + second)
        assert state.nbytes + 4 * layout.size <= largest_nbytes(trainer.base, state.weights.settings)
        trainer.unload(RUN)


def test_a_step_of_another_optimizer_is_refused_and_changes_nothing(trainer: Trainer) -> None:
    for run, first, second in ((RUN, dimuon(), ADAMW), (NEIGHBOUR, ADAMW, dimuon())):
        trainer.create(run, settings())
        compute(trainer, 0, run)
        trainer.optim_step(run, first)
        before = trainer.state(run)
        with pytest.raises(InvalidRequest, match=f"optimizer state of {first.optimizer}"):
            trainer.optim_step(run, second)
        assert trainer.state(run) is before
