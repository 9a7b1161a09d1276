"""A failure stays alone and changes nothing: bad data, steps that overflow, damaged folders, broken adapters."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from contracts.errors import EngineFailure, InvalidRequest
from contracts.losses import LossName
from contracts.operations import (
    Datum,
    ForwardBackwardOutput,
    LossSpec,
    OptimizerName,
    OptimStep,
    OptimStepped,
    TrainingBatch,
)
from engine.model.device import DeviceFailed
from engine.training.adamw import StepResult, StepTask, adamw_steps
from engine.training.adapter_state import STATE, read_state, write_state
from engine.training.trainer import Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    load,
    make_batch,
    matrices,
    save,
    settings,
)

_LONG = 2049
_ONES = np.ones(5, np.float32)
_SPOILED: dict[str, tuple[dict[str, object], str]] = {
    "token beyond the vocabulary": ({"tokens": np.array([0, 1, 2, 3, 320])}, "outside 0 to 319"),
    "target beyond the vocabulary": ({"targets": np.array([0, 1, 2, 3, 9999])}, "outside 0 to 319"),
    "negative target": ({"targets": np.array([0, 1, 2, 3, -100])}, "outside 0 to 319"),
    "too few targets": ({"targets": np.arange(3)}, r"must be \[5\]"),
    "too many targets": ({"targets": np.arange(7)}, r"must be \[5\]"),
    "weights of another shape": ({"inputs": {"weights": np.ones(3, np.float32)}}, "weights has shape"),
    "weights not finite": ({"inputs": {"weights": np.full(5, np.inf, np.float32)}}, "NaN or infinite"),
    "no tokens": ({"tokens": np.zeros(0, np.int64), "targets": np.zeros(0, np.int64)}, "has 0 tokens"),
    "beyond the context": ({"tokens": np.zeros(_LONG, np.int64), "targets": np.zeros(_LONG, np.int64)}, "1 to 2048"),
}


def good_batch() -> TrainingBatch:
    """Five tokens and nine."""
    return make_batch(1, LossName.CROSS_ENTROPY, (5, 9))


def state_of(trainer: Trainer) -> list[Tensor]:
    """Copies of the run's weights, moments and gradients."""
    adapter = trainer.state(RUN)
    moments = [adapter.optimizer.exp_avg, adapter.optimizer.exp_avg_sq] if adapter.optimizer else []
    gradient = [] if adapter.gradient is None else [adapter.gradient]
    return [tensor.clone() for tensor in (adapter.weights.vector, *moments, *gradient)]


def assert_unchanged(trainer: Trainer, before: list[Tensor]) -> None:
    for now, was in zip(state_of(trainer), before, strict=True):
        assert torch.equal(now, was)


@pytest.mark.parametrize("name", list(_SPOILED))
def test_bad_datum_fails_its_own_item_only(trainer: Trainer, name: str) -> None:
    fields, message = _SPOILED[name]
    batch = good_batch()
    datum = Datum(tokens=np.arange(5), targets=np.arange(5), inputs={"weights": _ONES})
    spoiled = replace(batch, data=[batch.data[1], replace(datum, **fields)])  # type: ignore[arg-type]
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    failed, fine = trainer.run_pass([backward(RUN, spoiled), backward(NEIGHBOUR, batch)])
    assert isinstance(failed, InvalidRequest)
    assert failed.message.startswith("data[1].")
    with pytest.raises(InvalidRequest, match=message):
        raise failed
    assert trainer.state(RUN).gradient is None
    assert isinstance(fine, ForwardBackwardOutput)


def test_batch_without_data_and_unknown_config_are_refused(trainer: Trainer) -> None:
    trainer.create(RUN, settings())
    empty = replace(good_batch(), data=[])
    configured = replace(good_batch(), loss=LossSpec(LossName.CROSS_ENTROPY, {"beta": 1.0}))
    for batch, message in ((empty, "data is empty"), (configured, "beta")):
        outcome = trainer.run_pass([backward(RUN, batch)])[0]
        assert isinstance(outcome, InvalidRequest)
        assert message in outcome.message


def test_optional_inputs_of_some_data_default_for_the_rest_and_others_are_ignored(trainer: Trainer) -> None:
    first, second = good_batch().data
    ones = np.ones(second.targets.shape, np.float32)
    partial = [first, replace(second, inputs={"something": np.ones((2, 2))})]
    complete = [first, replace(second, inputs={"weights": ones})]
    losses = []
    for data in (partial, complete):
        trainer.create(RUN, settings())
        outcome = trainer.run_pass([backward(RUN, replace(good_batch(), data=data))])[0]
        assert isinstance(outcome, ForwardBackwardOutput)
        losses.append(outcome.metrics["loss:sum"])
    assert losses[0] == losses[1]


def test_adapter_that_breaks_the_pass_fails_alone(trainer: Trainer) -> None:
    """A failure inside the fused computation itself: the others are computed without the one that broke it."""
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    trainer.run_pass([backward(NEIGHBOUR, good_batch())])
    expected = gradients_of(trainer, NEIGHBOUR)
    trainer.create(NEIGHBOUR, settings())
    state = trainer.state(RUN)
    trainer.put(RUN, replace(state, weights=replace(state.weights, vector=state.weights.vector[:-1])))
    broken, fine = trainer.run_pass([backward(RUN, good_batch()), backward(NEIGHBOUR, good_batch())])
    assert isinstance(broken, EngineFailure)
    assert isinstance(fine, ForwardBackwardOutput)
    for ours, theirs in zip(gradients_of(trainer, NEIGHBOUR), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_step_that_would_not_be_finite_changes_nothing(trainer: Trainer) -> None:
    """A step with eps 0: A's gradient of zero at the first step makes 0 / 0; a neighbour in the same step goes on."""
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
        trainer.run_pass([backward(run, good_batch())])
    before = state_of(trainer)
    failed, fine = trainer.optim_steps([(RUN, OptimStep(eps=0.0)), (NEIGHBOUR, OptimStep())])
    assert isinstance(failed, InvalidRequest)
    assert not isinstance(fine, Exception)
    assert_unchanged(trainer, before)
    trainer.optim_step(RUN, OptimStep())
    for ours, theirs in zip(matrices(trainer, RUN), matrices(trainer, NEIGHBOUR), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "fields", [{"beta1": 1.0}, {"beta2": 1.5}, {"learning_rate": float("nan")}, {"eps": -1.0}, {"learning_rate": 1e20}]
)
def test_step_without_meaning_is_refused_and_changes_nothing(trainer: Trainer, fields: dict[str, float]) -> None:
    trainer.create(RUN, settings())
    trainer.run_pass([backward(RUN, good_batch())])
    trainer.optim_step(RUN, OptimStep())
    trainer.run_pass([backward(RUN, good_batch())])
    before = state_of(trainer)
    trainer.create(NEIGHBOUR, settings())
    refused, fine = trainer.optim_steps(
        [(RUN, OptimStep(**{"weight_decay": 10.0, **fields})), (NEIGHBOUR, OptimStep())]
    )
    assert isinstance(refused, InvalidRequest)
    assert "adam_params" in refused.message
    assert not isinstance(fine, Exception)
    assert_unchanged(trainer, before)


def test_step_that_breaks_the_fused_step_fails_alone(trainer: Trainer) -> None:
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
        trainer.run_pass([backward(run, good_batch())])
    trainer.put(RUN, replace(trainer.state(RUN), gradient=torch.ones(3)))
    before = state_of(trainer)
    broken, fine = trainer.optim_steps([(RUN, OptimStep()), (NEIGHBOUR, OptimStep())])
    assert isinstance(broken, EngineFailure)
    assert not isinstance(fine, Exception)
    assert_unchanged(trainer, before)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TypeError("no tensor"), MemoryError()])
def test_a_step_whose_outcome_is_an_error_was_not_applied_and_the_groups_before_it_stay(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The steps are taken in two groups; the second one fails in a way that nobody foresaw."""
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
        trainer.run_pass([backward(run, good_batch())])
    before = state_of(trainer)

    def fail_second(tasks: Sequence[StepTask]) -> list[StepResult]:
        if any(task.step.learning_rate == 0.5 for task in tasks):
            raise error
        return adamw_steps(tasks)

    monkeypatch.setattr("engine.training.trainer.adamw_steps", fail_second)
    monkeypatch.setattr("engine.training.trainer._STEP_ELEMENTS", 1)
    fine, failed = trainer.optim_steps([(NEIGHBOUR, OptimStep()), (RUN, OptimStep(learning_rate=0.5))])
    assert isinstance(fine, OptimStepped)
    assert trainer.state(NEIGHBOUR).gradient is None
    assert isinstance(failed, EngineFailure)
    assert_unchanged(trainer, before)


def test_an_error_of_the_accelerator_is_nobodys_failure(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and steps end with the error that ends the process, and change nothing."""
    trainer.create(RUN, settings())
    trainer.run_pass([backward(RUN, good_batch())])
    before = state_of(trainer)

    def break_down(*_: object) -> NoReturn:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("engine.training.trainer.adamw_steps", break_down)
    monkeypatch.setattr(trainer.base, "hidden_states", break_down)
    with pytest.raises(DeviceFailed):
        trainer.optim_steps([(RUN, OptimStep())])
    with pytest.raises(DeviceFailed):
        trainer.run_pass([backward(RUN, good_batch())])
    assert_unchanged(trainer, before)


def test_gradients_that_overflow_together_are_refused_whole(trainer: Trainer) -> None:
    """Passes of which each has a twentieth of the largest norm whose square float32 holds, until their sum has more."""
    batch = good_batch()

    def weighted(weight: float) -> TrainingBatch:
        data = [replace(d, inputs={"weights": np.full(d.targets.shape, weight, np.float32)}) for d in batch.data]
        return replace(batch, data=data)

    trainer.create(RUN, settings())
    trainer.run_pass([backward(RUN, weighted(1.0))])
    norm = float(torch.stack(torch._foreach_norm(gradients_of(trainer, RUN))).norm())
    huge = weighted(torch.finfo(torch.float32).max ** 0.5 / (20 * norm))
    trainer.create(RUN, settings())
    outcomes = []
    for _ in range(30):
        before = state_of(trainer)
        outcomes.append(trainer.run_pass([backward(RUN, huge)])[0])
        if isinstance(outcomes[-1], InvalidRequest):
            break
    assert isinstance(outcomes[0], ForwardBackwardOutput)
    assert isinstance(outcomes[-1], InvalidRequest)
    assert_unchanged(trainer, before)


def test_steps_of_many_adapters_equal_steps_one_by_one(trainer: Trainer) -> None:
    """Two steps of one run in a call follow each other; an absent run fails alone."""
    step, other = OptimStep(learning_rate=1e-2, grad_clip_norm=0.3), OptimStep(learning_rate=3e-3, weight_decay=0.2)
    weights = []
    for together in (True, False):
        for number, run in enumerate((RUN, NEIGHBOUR)):
            trainer.create(run, settings(rank=4 + number))
            trainer.run_pass([backward(run, make_batch(number, LossName.CROSS_ENTROPY))])
        if together:
            outcomes = trainer.optim_steps([(RUN, step), (NEIGHBOUR, other), (RUN, other)])
            assert not any(isinstance(outcome, Exception) for outcome in outcomes)
        else:
            for run, one in ((RUN, step), (RUN, other), (NEIGHBOUR, other)):
                trainer.optim_step(run, one)
        weights.append([t.detach().clone() for run in (RUN, NEIGHBOUR) for t in matrices(trainer, run)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))
    trainer.unload(NEIGHBOUR)
    gone, fine = trainer.optim_steps([(NEIGHBOUR, step), (RUN, step)])
    assert isinstance(gone, EngineFailure)
    assert not isinstance(fine, Exception)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


_DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights cut": lambda folder: _cut(folder / "adapter_model.safetensors"),
    "moments cut": lambda folder: _cut(folder / "optimizer.safetensors"),
    "settings are no JSON": lambda folder: (folder / "weft.json").write_text("{"),
    "settings are a list": lambda folder: (folder / "weft.json").write_text("[]"),
    "settings lack the LoRA part": lambda folder: _edit(folder / "weft.json", lambda found: found.pop("lora")),
    "format of a later weft": lambda folder: _edit(folder / "weft.json", lambda found: found.update(format=99)),
    "another rank": lambda folder: _edit(folder / "weft.json", lambda found: found["lora"].update(rank=5)),  # type: ignore[attr-defined]
    "config gone": lambda folder: (folder / "adapter_config.json").unlink(),
}


@pytest.mark.parametrize("name", list(_DAMAGE))
def test_damaged_folder_is_refused_and_the_held_adapter_stays(trainer: Trainer, tmp_path: Path, name: str) -> None:
    trainer.create(RUN, settings())
    trainer.run_pass([backward(RUN, good_batch())])
    trainer.optim_step(RUN, OptimStep())
    trainer.run_pass([backward(RUN, good_batch())])
    save(trainer, RUN, tmp_path / "saved")
    before = state_of(trainer)
    _DAMAGE[name](tmp_path / "saved")
    with pytest.raises(InvalidRequest) as refusal:
        load(trainer, RUN, tmp_path / "saved")
    assert str(tmp_path) not in refusal.value.message
    assert_unchanged(trainer, before)


@pytest.mark.parametrize("damage", ["cut", "nonsense", "gone"])
def test_damaged_state_is_refused(trainer: Trainer, tmp_path: Path, damage: str) -> None:
    trainer.create(RUN, settings())
    trainer.run_pass([backward(RUN, good_batch())])
    write_state(tmp_path / "state", trainer.base, trainer.state(RUN))
    file = tmp_path / "state" / STATE
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-50] if damage == "cut" else b"x" * 100)
    with pytest.raises(InvalidRequest, match="state"):
        read_state(tmp_path / "state", trainer.base)


@pytest.mark.parametrize(
    "step",
    [torch.tensor(one) for one in (-1, 2**53 + 1, 2**63 - 1, 1.5, float("nan"), float("inf"))] + [torch.ones(2)],
    ids=str,
)
@pytest.mark.parametrize("optimizer", list(OptimizerName))
def test_a_step_count_that_no_training_has_is_refused(
    trainer: Trainer, tmp_path: Path, optimizer: OptimizerName, step: Tensor
) -> None:
    trainer.create(RUN, settings())
    trainer.optim_step(RUN, OptimStep(optimizer=optimizer))
    save(trainer, RUN, tmp_path / "saved")
    path = tmp_path / "saved" / "optimizer.safetensors"
    moments = load_file(path)
    save_file(moments | {"step": torch.tensor(2**53)}, path)
    load(trainer, RUN, tmp_path / "saved")
    save_file(moments | {"step": step}, path)
    with pytest.raises(InvalidRequest, match="damaged"):
        load(trainer, RUN, tmp_path / "saved")


def test_moments_of_another_adapter_are_refused(trainer: Trainer, tmp_path: Path) -> None:
    for run, rank in ((RUN, 4), (NEIGHBOUR, 8)):
        trainer.create(run, settings(rank=rank))
        trainer.optim_step(run, OptimStep())
        save(trainer, run, tmp_path / str(rank), optimizer=True)
    (tmp_path / "8" / "optimizer.safetensors").rename(tmp_path / "4" / "optimizer.safetensors")
    with pytest.raises(InvalidRequest, match="damaged"):
        load(trainer, RUN, tmp_path / "4")


def test_failed_write_leaves_nothing(trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    save(trainer, RUN, tmp_path / "saved", optimizer=False)
    with pytest.raises(OSError, match="saved"):
        save(trainer, RUN, tmp_path / "saved", optimizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
