"""The tiny base in weft's trainer, and the same adapter in plain PEFT with torch autograd as the independent reference."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from contracts.base_model import read_base_model_facts
from contracts.ids import RunId
from contracts.losses import LossName
from contracts.operations import Datum, LoraSettings, LossSpec, TrainingBatch
from engine.model.base import BaseModel
from engine.training.checkpoint_files import read_checkpoint, write_checkpoint
from engine.training.trainer import PassItem, Trainer, loaded_state

RUN, NEIGHBOUR = RunId("first:train:0"), RunId("second:train:0")
POLICY_LOSSES = (
    LossName.IMPORTANCE_SAMPLING,
    LossName.PPO,
    LossName.CISPO,
    LossName.DRO,
    LossName.GSPO,
    LossName.STABLE_REINFORCE,
)


@pytest.fixture(scope="session")
def base(tiny_model_dir: Path) -> BaseModel:
    """The tiny base, loaded once."""
    return BaseModel.load(read_base_model_facts("weft/tiny", tiny_model_dir, None))


@pytest.fixture
def trainer(base: BaseModel) -> Trainer:
    """A trainer with nothing in it."""
    return Trainer(base)


def make_datum(
    rng: np.random.Generator, length: int, loss: LossName, *, width: int | None = None, vocabulary: int = 300
) -> Datum:
    """A random sequence with the inputs its loss needs; targets (N,) or (N, width)."""
    shape = (length,) if width is None else (length, width)
    inputs: dict[str, np.ndarray] = {}
    if loss is LossName.CROSS_ENTROPY:
        inputs["weights"] = rng.normal(size=shape).astype(np.float32)
    else:
        inputs["logprobs"] = (-5.5 + 0.4 * rng.normal(size=shape)).astype(np.float32)
        inputs["advantages"] = rng.normal(size=shape).astype(np.float32)
    if loss is LossName.GSPO:
        inputs["sequence_ratio_mask"] = (
            (np.arange(length) > length // 3).astype(np.float32).repeat(width or 1).reshape(shape)
        )
    return Datum(tokens=rng.integers(0, vocabulary, length), targets=rng.integers(0, vocabulary, shape), inputs=inputs)


def make_batch(
    seed: int, loss: LossName, lengths: tuple[int, ...] = (7, 12, 3), *, width: int | None = None
) -> TrainingBatch:
    """A batch of random sequences."""
    rng = np.random.default_rng(seed)
    return TrainingBatch(LossSpec(loss), [make_datum(rng, length, loss, width=width) for length in lengths])


def backward(run: RunId, batch: TrainingBatch) -> PassItem:
    """A ``forward_backward`` item."""
    return PassItem(run=run, batch=batch, backward=True)


def randomise(trainer: Trainer, run: RunId, seed: int) -> None:
    """Give B random values, so that every gradient is something."""
    generator = torch.Generator().manual_seed(seed)
    for pair in trainer.state(run).weights.tensors.values():
        with torch.no_grad():
            pair.b.copy_(0.05 * torch.randn(pair.b.shape, generator=generator))


def matrices(trainer: Trainer, run: RunId, vector: Tensor | None = None) -> list[Tensor]:
    """The run's weights, or the vector's parts, A before B in the base's order of projections."""
    weights = trainer.state(run).weights
    pairs = weights.layout.pairs(weights.vector if vector is None else vector)
    return [part for pair in pairs.values() for part in (pair.a, pair.b)]


def gradients_of(trainer: Trainer, run: RunId) -> list[Tensor]:
    """The run's accumulated gradient, by matrix."""
    gradient = trainer.state(run).gradient
    assert gradient is not None
    return matrices(trainer, run, gradient)


def save(trainer: Trainer, run: RunId, directory: Path, *, optimizer: bool = True) -> int:
    """Write the run's checkpoint."""
    return write_checkpoint(directory, trainer.base, trainer.state(run), optimizer=optimizer)


def load(trainer: Trainer, run: RunId, directory: Path, *, optimizer: bool = True) -> None:
    """Let the run go on from a checkpoint."""
    found = read_checkpoint(directory, trainer.base, optimizer=optimizer)
    trainer.put(run, loaded_state(trainer.state(run), found) if trainer.holds(run) else found)


@dataclass
class Reference:
    """Plain PEFT on its own copy of the base, with the weights of a trainer's adapter."""

    model: PeftModel
    parameters: list[torch.nn.Parameter]

    def logprobs(self, datum: Datum) -> Tensor:
        """Log-probabilities of the targets, differentiable, of their shape."""
        logits = self.model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        targets = torch.from_numpy(datum.targets)
        table = torch.log_softmax(logits, dim=-1)
        return table.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The batch's loss, written out from the formulas."""
        total = torch.zeros(())
        for datum in batch.data:
            logp = self.logprobs(datum)
            given = {name: torch.from_numpy(values) for name, values in datum.inputs.items()}
            total = total + reference_loss(batch.loss, logp, given)
        return total


def reference_loss(spec: LossSpec, logp: Tensor, given: dict[str, Tensor]) -> Tensor:
    """The SDK's public formulas, one line a loss."""
    if spec.name is LossName.CROSS_ENTROPY:
        return (-logp * given["weights"]).sum()
    ratio = (logp - given["logprobs"]).exp()
    low, high = (0.0, 4.0) if spec.name is LossName.CISPO else (0.8, 1.2)
    low, high = spec.config.get("clip_low_threshold", low), spec.config.get("clip_high_threshold", high)
    clipped, advantages = ratio.clamp(low, high), given["advantages"]
    match spec.name:
        case LossName.IMPORTANCE_SAMPLING:
            return -(ratio * advantages).sum()
        case LossName.PPO:
            return -torch.min(ratio * advantages, clipped * advantages).sum()
        case LossName.CISPO:
            return -(clipped.detach() * logp * advantages).sum()
        case LossName.DRO:
            beta = spec.config.get("beta", 0.05)
            return -(logp * advantages - 0.5 * beta * (logp - given["logprobs"]) ** 2).sum()
        case LossName.GSPO:
            marked = given["sequence_ratio_mask"] != 0
            sequence = (logp.detach() - given["logprobs"])[marked].mean().exp()
            token = sequence * logp.exp() / logp.exp().detach()
            return -torch.min(token * advantages, token.clamp(low, high) * advantages).sum()
        case LossName.STABLE_REINFORCE:
            cap, coefficient = spec.config.get("ratio_cap", 2.0), spec.config.get("kl_coeff", 0.01)
            tangent = (cap - 1 - math.log(cap)) + (cap - 1) * (ratio.log() - math.log(cap))
            divergence = torch.where(ratio <= cap, ratio - 1 - ratio.log(), tangent)
            sampled = (given["logprobs"] != 0) | (advantages != 0)
            gain = ratio.clamp(max=cap).detach() * logp * advantages
            return ((coefficient * divergence - gain) * sampled).sum()
    raise AssertionError(spec.name)


def reference_for(trainer: Trainer, run: RunId, model_dir: Path) -> Reference:
    """PEFT's model with the trainer's adapter copied in; parameters in the trainer's order."""
    weights = trainer.state(run).weights
    targets = sorted({name.rpartition(".")[2] for name in weights.tensors})
    config = LoraConfig(
        r=weights.settings.rank,
        lora_alpha=int(weights.settings.alpha),
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), config).eval()
    named = dict(model.named_parameters())
    parameters = []
    for name, pair in weights.tensors.items():
        for part, tensor in (("A", pair.a), ("B", pair.b)):
            parameter = named[f"base_model.model.{name}.lora_{part}.default.weight"]
            with torch.no_grad():
                parameter.copy_(tensor)
            parameters.append(parameter)
    return Reference(model, parameters)


def settings(rank: int = 8, seed: int = 1, **flags: bool) -> LoraSettings:
    """LoRA settings for a test."""
    return LoraSettings(rank=rank, seed=seed, **flags)
