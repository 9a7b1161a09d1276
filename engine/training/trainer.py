"""One frozen base, many adapters: fused passes, optimiser steps, saves and loads.

Synchronous, and called from one thread. Invariants: an item's gradient reaches only its own adapter's accumulators, and
all of it or none; an item that fails fails alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.ids import RunId
from engine.contracts.operations import ForwardBackwardOutput, LoraSettings, OptimStep, OptimStepped, TrainingBatch
from engine.training.adamw import adamw_step, clip_gradients
from engine.training.base import BaseModel
from engine.training.checkpoint_files import (
    OptimizerState,
    read_gradients,
    read_lora_weights,
    read_optimizer,
    write_adapter,
)
from engine.training.fused_pass import FusedPass, PassMember
from engine.training.lora import LoraWeights

DEFAULT_PASS_TOKEN_BUDGET = 16384


@dataclass(frozen=True, slots=True)
class PassItem:
    """One ``forward`` (``backward`` false) or ``forward_backward`` operation of a run."""

    run: RunId
    batch: TrainingBatch
    backward: bool


@dataclass(slots=True)
class _Adapter:
    """An adapter in training. Gradients and moments are None while they are zero."""

    weights: LoraWeights
    gradients: list[Tensor] | None = None
    optimizer: OptimizerState | None = None

    def optimizer_state(self) -> OptimizerState:
        """The moments, made of zeros at first use."""
        if self.optimizer is None:
            parameters = self.weights.flat()
            self.optimizer = OptimizerState(
                exp_avg=[torch.zeros_like(parameter) for parameter in parameters],
                exp_avg_sq=[torch.zeros_like(parameter) for parameter in parameters],
                step=0,
            )
        return self.optimizer


class Trainer:
    """Holds the adapters of one base model in memory and computes on them."""

    def __init__(self, base: BaseModel, *, pass_token_budget: int = DEFAULT_PASS_TOKEN_BUDGET) -> None:
        self._base = base
        self._token_budget = pass_token_budget
        self._adapters: dict[RunId, _Adapter] = {}

    def holds(self, run: RunId) -> bool:
        """Whether the run's adapter is in memory."""
        return run in self._adapters

    def runs(self) -> list[RunId]:
        """Runs whose adapters are in memory."""
        return list(self._adapters)

    def create(self, run: RunId, settings: LoraSettings) -> None:
        """Make a fresh adapter. Raises ``InvalidRequest`` when the settings leave nothing to train."""
        weights = LoraWeights.initialise(self._base, settings)
        if not weights.tensors:
            raise InvalidRequest("lora_config: train_attn, train_mlp and train_unembed leave nothing to train")
        self._adapters[run] = _Adapter(_trainable(weights))

    def unload(self, run: RunId) -> None:
        """Drop the adapter; one that is not there is fine."""
        self._adapters.pop(run, None)

    def run_pass(self, items: Sequence[PassItem]) -> list[ForwardBackwardOutput | WeftError]:
        """Compute the items, fused; outcomes in their order. Raises only for a failure of the whole pass."""
        outcomes: dict[int, ForwardBackwardOutput | WeftError] = {}
        for wave in _waves(items):
            members = []
            for index in wave:
                adapter = self._adapters.get(items[index].run)
                if adapter is None:
                    outcomes[index] = EngineFailure("the adapter is not in memory")
                else:
                    members.append(PassMember(index, items[index].batch, items[index].backward, adapter.weights))
            results = FusedPass(self._base, members, token_budget=self._token_budget).run()
            for member, result in zip(members, results, strict=True):
                outcomes[member.index] = result.outcome
                if result.gradients is not None:
                    self._accumulate(self._adapters[items[member.index].run], result.gradients)
        return [outcomes[index] for index in range(len(items))]

    @staticmethod
    def _accumulate(adapter: _Adapter, gradients: list[Tensor]) -> None:
        if adapter.gradients is None:
            adapter.gradients = gradients
        else:
            torch._foreach_add_(adapter.gradients, gradients)

    def optim_step(self, run: RunId, step: OptimStep) -> OptimStepped:
        """One AdamW step on the accumulated gradients (zeros if none), which are then cleared.

        Raises ``InvalidRequest`` when the gradients overflowed: they are cleared, weights and moments stay.
        """
        adapter = self._held(run)
        parameters = adapter.weights.flat()
        gradients = adapter.gradients or [torch.zeros_like(parameter) for parameter in parameters]
        adapter.gradients = None
        norm = clip_gradients(gradients, step.grad_clip_norm)
        if not torch.isfinite(norm):
            raise InvalidRequest("the accumulated gradients are not finite; they were cleared and no step was taken")
        state = adapter.optimizer_state()
        taken = state.step + 1
        adamw_step(parameters, gradients, state.exp_avg, state.exp_avg_sq, step_count=taken, step=step)
        adapter.optimizer = replace(state, step=taken)
        return OptimStepped(metrics={"grad_norm:max": float(norm), "step:max": float(taken)})

    def optim_steps(self, steps: Sequence[tuple[RunId, OptimStep]]) -> list[OptimStepped | WeftError]:
        """Steps of many adapters; outcomes in their order."""
        outcomes: list[OptimStepped | WeftError] = []
        for run, step in steps:
            try:
                outcomes.append(self.optim_step(run, step))
            except WeftError as error:
                outcomes.append(error)
        return outcomes

    def save(self, run: RunId, directory: Path, *, optimizer: bool, gradients: bool = False) -> int:
        """Write the adapter's folder; returns its size in bytes. Raises ``OSError``."""
        adapter = self._held(run)
        return write_adapter(
            directory,
            self._base,
            adapter.weights,
            optimizer=adapter.optimizer if optimizer else None,
            gradients=adapter.gradients if gradients else None,
        )

    def create_from(self, run: RunId, directory: Path, *, optimizer: bool, gradients: bool = False) -> LoraSettings:
        """Make an adapter from a folder, with the folder's own settings. Raises ``InvalidRequest``."""
        weights = read_lora_weights(directory, self._base)
        self._adapters[run] = _Adapter(
            weights=_trainable(weights),
            gradients=read_gradients(directory, weights) if gradients else None,
            optimizer=read_optimizer(directory, weights) if optimizer else None,
        )
        return weights.settings

    def load(self, run: RunId, directory: Path, *, optimizer: bool) -> None:
        """Replace a held adapter's weights, and its moments if ``optimizer``, else reset them; gradients are cleared.

        Raises ``InvalidRequest``, changing nothing, when rank or targets differ.
        """
        held = self._held(run)
        weights = read_lora_weights(directory, self._base)
        if weights.settings.rank != held.weights.settings.rank or weights.tensors.keys() != held.weights.tensors.keys():
            raise InvalidRequest(
                f"path: the checkpoint has rank {weights.settings.rank} on {len(weights.tensors)} layers, this model has "
                f"rank {held.weights.settings.rank} on {len(held.weights.tensors)}; they must be the same"
            )
        state = read_optimizer(directory, weights) if optimizer else None
        self._adapters[run] = _Adapter(weights=_trainable(weights), optimizer=state)

    def _held(self, run: RunId) -> _Adapter:
        try:
            return self._adapters[run]
        except KeyError:
            raise EngineFailure("the adapter is not in memory") from None


def _trainable(weights: LoraWeights) -> LoraWeights:
    for tensor in weights.flat():
        tensor.requires_grad_(True)
    return weights


def _waves(items: Sequence[PassItem]) -> list[list[int]]:
    """Indices of items such that no wave holds two of one run: their gradients must be told apart."""
    waves: list[list[int]] = []
    depth: dict[RunId, int] = {}
    for index, item in enumerate(items):
        place = depth.get(item.run, 0)
        depth[item.run] = place + 1
        if place == len(waves):
            waves.append([])
        waves[place].append(index)
    return waves
