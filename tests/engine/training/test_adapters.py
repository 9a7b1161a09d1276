"""Adapters on disk and in company: PEFT's format both ways, bit-equal resumes, and neighbours that change nothing."""

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig

from contracts.base_model import read_base_model_facts
from contracts.errors import EngineFailure, InvalidRequest, WeftError
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import ForwardBackwardOutput, LoraSettings, OptimStep, TrainingBatch
from engine.model.adapter_folder import read_lora_weights
from engine.model.base import BaseModel
from engine.training.adapter_state import AdapterState, read_state, write_state
from engine.training.trainer import PassItem, Trainer
from tests.engine.training.conftest import (
    NEIGHBOUR,
    RUN,
    backward,
    gradients_of,
    load,
    make_batch,
    matrices,
    randomise,
    reference_for,
    save,
    settings,
)

LEARNING = OptimStep(learning_rate=1e-2)


def output(result: ForwardBackwardOutput | WeftError) -> ForwardBackwardOutput:
    """The output of an item that must have worked."""
    assert isinstance(result, ForwardBackwardOutput), result
    return result


def train(trainer: Trainer, run: RunId, steps: int, seed: int = 0) -> None:
    """A few steps on random data."""
    for number in range(steps):
        trainer.run_pass([backward(run, make_batch(seed + number, LossName.CROSS_ENTROPY))])
        trainer.optim_step(run, LEARNING)


def logprobs(trainer: Trainer, run: RunId, batch: TrainingBatch) -> np.ndarray:
    """All target logprobs of the batch, flat."""
    result = output(trainer.run_pass([PassItem(run, batch, False)])[0])
    return np.concatenate([row.ravel() for row in result.logprobs])


def peft_logprobs(model_dir: Path, adapter: Path, batch: TrainingBatch) -> np.ndarray:
    """The same by plain transformers and PEFT."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), adapter)
    rows = []
    for datum in batch.data:
        with torch.inference_mode():
            table = torch.log_softmax(model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0], -1)
        rows.append(table.gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0].numpy())
    return np.concatenate(rows)


def test_save_load_next_step_is_bit_equal(trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    train(trainer, RUN, 3)
    save(trainer, RUN, tmp_path / "saved", optimizer=True)
    load(trainer, NEIGHBOUR, tmp_path / "saved")
    for run in (RUN, NEIGHBOUR):
        train(trainer, run, 2, seed=20)
    for ours, theirs in zip(matrices(trainer, RUN), matrices(trainer, NEIGHBOUR), strict=True):
        assert torch.equal(ours, theirs)


def test_load_into_a_model_is_bit_equal_and_drops_gradients(trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    train(trainer, RUN, 2)
    save(trainer, RUN, tmp_path / "saved", optimizer=True)
    load(trainer, NEIGHBOUR, tmp_path / "saved")
    train(trainer, RUN, 2, seed=5)
    trainer.run_pass([backward(RUN, make_batch(99, LossName.CROSS_ENTROPY))])
    load(trainer, RUN, tmp_path / "saved")
    for run in (RUN, NEIGHBOUR):
        train(trainer, run, 1, seed=30)
    for ours, theirs in zip(matrices(trainer, RUN), matrices(trainer, NEIGHBOUR), strict=True):
        assert torch.equal(ours, theirs)


def tensors_of(state: AdapterState) -> list[Tensor]:
    """Weights, gradient, moments and step count of a state that has them all."""
    assert state.gradient is not None
    assert state.optimizer is not None
    optimizer = state.optimizer
    step = torch.tensor(optimizer.step)
    return [state.weights.vector, state.gradient, optimizer.exp_avg, optimizer.exp_avg_sq, step]


def test_state_on_disk_is_bit_equal(base: BaseModel, trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    train(trainer, RUN, 1)
    trainer.run_pass([backward(RUN, make_batch(3, LossName.CROSS_ENTROPY))])
    write_state(tmp_path / "snapshot", base, trainer.state(RUN))
    trainer.put(NEIGHBOUR, read_state(tmp_path / "snapshot", base))
    for ours, theirs in zip(tensors_of(trainer.state(NEIGHBOUR)), tensors_of(trainer.state(RUN)), strict=True):
        assert torch.equal(ours, theirs)
        # Kernels round by how memory is aligned: in a file it hangs on the header's length.
        assert ours.data_ptr() % 64 == 0
    assert trainer.state(NEIGHBOUR).weights.settings == trainer.state(RUN).weights.settings


def test_load_of_another_rank_is_refused_and_changes_nothing(trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings(rank=4))
    save(trainer, RUN, tmp_path / "saved", optimizer=True)
    trainer.create(NEIGHBOUR, settings(rank=8))
    before = [tensor.detach().clone() for tensor in matrices(trainer, NEIGHBOUR)]
    with pytest.raises(InvalidRequest, match="rank 4"):
        load(trainer, NEIGHBOUR, tmp_path / "saved")
    for ours, was in zip(matrices(trainer, NEIGHBOUR), before, strict=True):
        assert torch.equal(ours, was)


@pytest.mark.parametrize("flags", [{}, {"train_unembed": False}, {"train_attn": False, "train_unembed": False}])
def test_exported_adapter_gives_the_same_logprobs_in_peft(
    trainer: Trainer, tiny_model_dir: Path, tmp_path: Path, flags: dict[str, bool]
) -> None:
    trainer.create(RUN, settings(**flags))
    train(trainer, RUN, 2)
    save(trainer, RUN, tmp_path / "exported", optimizer=False)
    batch = make_batch(40, LossName.CROSS_ENTROPY)
    np.testing.assert_allclose(
        logprobs(trainer, RUN, batch), peft_logprobs(tiny_model_dir, tmp_path / "exported", batch), atol=1e-5
    )


def test_adapter_made_by_peft_trains_on_in_weft(trainer: Trainer, tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    randomise(trainer, RUN, 3)
    reference = reference_for(trainer, RUN, tiny_model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.model.save_pretrained(tmp_path / "peft")
    load(trainer, NEIGHBOUR, tmp_path / "peft")
    lora = trainer.state(NEIGHBOUR).weights.settings
    assert (lora.rank, lora.alpha) == (8, 32.0)
    batch = make_batch(41, LossName.CROSS_ENTROPY)
    np.testing.assert_array_equal(logprobs(trainer, NEIGHBOUR, batch), logprobs(trainer, RUN, batch))


def test_damaged_folder_is_refused(base: BaseModel, trainer: Trainer, tmp_path: Path) -> None:
    trainer.create(RUN, settings())
    save(trainer, RUN, tmp_path / "saved", optimizer=True)
    (tmp_path / "saved" / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidRequest, match="damaged"):
        read_lora_weights(tmp_path / "saved", base)
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(InvalidRequest, match="missing"):
        read_lora_weights(tmp_path / "saved", base)


def test_same_seed_makes_the_same_adapter_whatever_else_runs(trainer: Trainer) -> None:
    trainer.create(RUN, settings(seed=77))
    torch.manual_seed(1234)
    torch.rand(17)
    trainer.create(NEIGHBOUR, settings(seed=77))
    other = RunId("third:train:0")
    trainer.create(other, settings(seed=78))
    adapters = [matrices(trainer, run) for run in (RUN, NEIGHBOUR, other)]
    assert all(torch.equal(first, second) for first, second in zip(adapters[0], adapters[1], strict=True))
    assert not torch.equal(adapters[0][0], adapters[2][0])


def test_flags_choose_the_projections(trainer: Trainer, base: BaseModel) -> None:
    for group in ("attn", "mlp", "unembed"):
        flags = {f"train_{name}": name == group for name in ("attn", "mlp", "unembed")}
        trainer.create(RUN, settings(**flags))
        found = {base.projections[name].group for name in trainer.state(RUN).weights.tensors}
        assert found == {group}


def mixed_settings(number: int) -> LoraSettings:
    """LoRA settings of neighbour ``number``: ranks 1 to 15, any alpha, every choice of layers."""
    flags = {"train_attn": number % 3 > 0, "train_mlp": number % 3 < 2, "train_unembed": number % 2 == 0}
    return replace(settings(rank=1 + number, seed=number, **flags), alpha=4.0 * (1 + number % 5))


def assert_equal_training(trainer: Trainer, run: RunId, alone: RunId) -> None:
    """Gradients within 1e-5 of the largest of each matrix, weights within 1e-5 of each matrix's norm.

    AdamW divides a gradient by its own size: where that is nothing but rounding, a single weight steps by rounding too.
    """
    for ours, theirs in zip(gradients_of(trainer, run), gradients_of(trainer, alone), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    for ours, theirs in zip(matrices(trainer, run), matrices(trainer, alone), strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("head", [True, False], ids=["head", "no-head"])
def test_fifteen_neighbours_change_nothing(trainer: Trainer, head: bool) -> None:
    """Isolation of numbers: outputs, gradients and ten steps alone equal those in mixed company, 1e-5 relative.

    Of ranks, alphas, layers, lengths, losses and target widths.
    """
    neighbours = [RunId(f"n{number}:train:0") for number in range(15)]
    alone = RunId("alone:train:0")
    for run in (RUN, alone):
        trainer.create(run, settings(rank=8, seed=1, train_unembed=head))
        randomise(trainer, run, 99)
    for number, run in enumerate(neighbours):
        trainer.create(run, mixed_settings(number))
        randomise(trainer, run, number)
    losses = [loss for loss in LossName if loss is not LossName.CUSTOM]
    for step in range(10):
        batch = make_batch(step, LossName.PPO)
        by_itself = output(trainer.run_pass([backward(alone, batch)])[0])
        company = [
            backward(
                run,
                make_batch(
                    100 + number, losses[number % 5], (3 + number, 40 - number), width=(None, 2)[number % 4 == 3]
                ),
            )
            for number, run in enumerate(neighbours)
        ]
        together = output(trainer.run_pass([*company[:7], backward(RUN, batch), *company[7:]])[7])
        # The loss sums about 20 in size to about 0.
        assert together.metrics["loss:sum"] == pytest.approx(by_itself.metrics["loss:sum"], rel=1e-5, abs=1e-4)
        for mine, lone in zip(together.logprobs, by_itself.logprobs, strict=True):
            np.testing.assert_allclose(mine, lone, rtol=1e-5)
        assert_equal_training(trainer, RUN, alone)
        trainer.optim_steps([(run, OptimStep(learning_rate=1e-3)) for run in (RUN, alone, *neighbours)])
    for run in (RUN, alone):
        trainer.run_pass([backward(run, make_batch(50, LossName.CROSS_ENTROPY))])
    assert_equal_training(trainer, RUN, alone)


def test_neighbour_that_fails_or_goes_changes_nothing(trainer: Trainer) -> None:
    """A NaN, an absent input or an unloaded adapter fails its own item and changes no other."""
    poisoned, gone = RunId("poisoned:train:0"), RunId("gone:train:0")
    for run in (RUN, NEIGHBOUR, poisoned):
        trainer.create(run, settings(seed=1))
    with torch.no_grad():
        trainer.state(poisoned).weights.vector.fill_(float("nan"))
    batch = make_batch(2, LossName.CROSS_ENTROPY)
    incomplete = make_batch(3, LossName.PPO)
    incomplete = replace(incomplete, data=[replace(datum, inputs={}) for datum in incomplete.data])
    expected = output(trainer.run_pass([backward(NEIGHBOUR, batch)])[0])
    mixed = trainer.run_pass(
        [backward(poisoned, batch), backward(gone, batch), backward(RUN, batch), backward(NEIGHBOUR, incomplete)]
    )
    assert isinstance(mixed[0], InvalidRequest)
    assert isinstance(mixed[1], EngineFailure)
    assert isinstance(mixed[3], InvalidRequest)
    assert trainer.state(poisoned).gradient is None
    assert output(mixed[2]).metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    for ours, theirs in zip(gradients_of(trainer, RUN), gradients_of(trainer, NEIGHBOUR), strict=True):
        assert torch.isfinite(ours).all()
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(float(theirs.abs().max()), 1e-2)


def test_two_passes_of_one_run_in_one_call_add_up(trainer: Trainer) -> None:
    batch = make_batch(4, LossName.CROSS_ENTROPY)
    for run in (RUN, NEIGHBOUR):
        trainer.create(run, settings())
    trainer.run_pass([backward(RUN, batch), backward(RUN, batch)])
    for _ in range(2):
        trainer.run_pass([backward(NEIGHBOUR, batch)])
    for ours, theirs in zip(gradients_of(trainer, RUN), gradients_of(trainer, NEIGHBOUR), strict=True):
        torch.testing.assert_close(ours, theirs)


def tiny_configs() -> dict[str, PretrainedConfig]:
    """Architectures unlike the tiny base: transposed weights, tied heads, capped logits, alternating windows."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "gpt2": GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=128),
        "llama": LlamaConfig(**sizes, intermediate_size=96, num_key_value_heads=2, max_position_embeddings=128),
        "gemma2": Gemma2Config(
            **sizes, intermediate_size=96, num_key_value_heads=2, head_dim=16, max_position_embeddings=128
        ),
    }


@pytest.mark.parametrize("name", list(tiny_configs()))
def test_other_architectures_train_and_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model_dir = tmp_path / name
    AutoModelForCausalLM.from_config(tiny_configs()[name]).float().save_pretrained(model_dir)
    other = Trainer(BaseModel.load(read_base_model_facts(name, model_dir, None)))
    other.create(RUN, settings())
    other.create(NEIGHBOUR, settings(rank=2, seed=5))
    train(other, RUN, 2)
    other.run_pass([backward(NEIGHBOUR, make_batch(8, LossName.PPO))])
    save(other, RUN, tmp_path / "exported", optimizer=False)
    batch = make_batch(42, LossName.CROSS_ENTROPY)
    np.testing.assert_allclose(
        logprobs(other, RUN, batch), peft_logprobs(model_dir, tmp_path / "exported", batch), atol=2e-5
    )
