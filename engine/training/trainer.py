"""One frozen base, many adapters: fused passes, optimiser steps, saves and loads.

Synchronous, and called from one thread. Invariants: an item's gradient reaches only its own adapter's accumulators, and
all of it or none; an item that fails fails alone.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.contracts.errors import EngineFailure, InvalidRequest, WeftError
from engine.contracts.ids import RunId
from engine.contracts.operations import ForwardBackwardOutput, LoraSettings, OptimStep, OptimStepped, TrainingBatch
from engine.training.adamw import AdamWTask, adamw_steps, check_step
from engine.training.base import BaseModel
from engine.training.batch_checks import check_batch
from engine.training.checkpoint_files import (
    OptimizerState,
    read_gradients,
    read_lora_weights,
    read_optimizer,
    write_adapter,
)
from engine.training.fused_pass import FusedPass, MemberResult, PassMember
from engine.training.lora import LoraWeights

log = logging.getLogger(__name__)

DEFAULT_PASS_TOKEN_BUDGET = 16384
_STEP_ELEMENTS = 2**28
"""Parameters stepped at once: what a fused step needs beside the adapters is a few times as much memory."""


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

    def task(self, step: OptimStep) -> AdamWTask:
        """The adapter's next step."""
        parameters = self.weights.flat()
        state = self.optimizer or OptimizerState(_zeros(parameters), _zeros(parameters), step=0)
        return AdamWTask(
            parameters=parameters,
            gradients=self.gradients or _zeros(parameters),
            exp_avg=state.exp_avg,
            exp_avg_sq=state.exp_avg_sq,
            step_count=state.step + 1,
            step=step,
        )


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
        """Compute the items, fused; outcomes in their order. Raises only for a failure of the whole pass, which then
        has changed nothing."""
        outcomes: dict[int, ForwardBackwardOutput | WeftError] = {}
        results: dict[int, MemberResult] = {}
        for wave in _waves([item.run for item in items]):
            members = []
            for index in wave:
                try:
                    members.append(self._member(index, items[index]))
                except WeftError as error:
                    outcomes[index] = error
            wave_results = FusedPass(self._base, members, token_budget=self._token_budget).run()
            results |= {member.index: result for member, result in zip(members, wave_results, strict=True)}
        for index, result in sorted(results.items()):
            outcomes[index] = self._accumulate(self._adapters[items[index].run], result)
        return [outcomes[index] for index in range(len(items))]

    def _member(self, index: int, item: PassItem) -> PassMember:
        weights = self._held(item.run).weights
        check_batch(item.batch, self._base.facts)
        return PassMember(index, item.batch, item.backward, weights)

    @staticmethod
    def _accumulate(adapter: _Adapter, result: MemberResult) -> ForwardBackwardOutput | WeftError:
        """Add the result's gradients, all or none: a sum without a finite norm would fail every later step."""
        if result.gradients is None:
            return result.outcome
        gradients = result.gradients
        if adapter.gradients is not None:
            gradients = list(torch._foreach_add(adapter.gradients, gradients))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if not torch.isfinite(norm):
            return InvalidRequest("the gradient is too large or not finite: lower the weights or advantages")
        adapter.gradients = gradients
        return result.outcome

    def optim_step(self, run: RunId, step: OptimStep) -> OptimStepped:
        """One AdamW step on the accumulated gradients (zeros if none), which are then cleared.

        Raises ``InvalidRequest``, changing nothing, when it would leave weights or moments that are not finite.
        """
        outcome = self.optim_steps([(run, step)])[0]
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome

    def optim_steps(self, steps: Sequence[tuple[RunId, OptimStep]]) -> list[OptimStepped | WeftError]:
        """Steps of many adapters, fused; outcomes in their order. One that fails fails alone."""
        outcomes: dict[int, OptimStepped | WeftError] = {}
        for wave in _waves([run for run, _ in steps]):
            group: list[int] = []
            elements = 0
            for index in wave:
                run, step = steps[index]
                try:
                    check_step(step)
                    size = sum(parameter.numel() for parameter in self._held(run).weights.flat())
                except WeftError as error:
                    outcomes[index] = error
                    continue
                if group and elements + size > _STEP_ELEMENTS:
                    outcomes |= self._step_together({place: steps[place] for place in group})
                    group, elements = [], 0
                group.append(index)
                elements += size
            if group:
                outcomes |= self._step_together({place: steps[place] for place in group})
        return [outcomes[index] for index in range(len(steps))]

    def _step_together(self, steps: Mapping[int, tuple[RunId, OptimStep]]) -> dict[int, OptimStepped | WeftError]:
        """Steps of adapters in memory, no two of one run, by the caller's index."""
        adapters = [self._adapters[run] for run, _ in steps.values()]
        tasks = [adapter.task(step) for adapter, (_, step) in zip(adapters, steps.values(), strict=True)]
        outcomes: dict[int, OptimStepped | WeftError] = {}
        try:
            results = adamw_steps(tasks)
        except RuntimeError:
            log.exception("optimizer steps failed base=%s steps=%d", self._base.facts.name, len(tasks))
            if len(steps) > 1:
                for index, one in steps.items():
                    outcomes |= self._step_together({index: one})
                return outcomes
            failure = EngineFailure(
                "weft could not compute this step, possibly for lack of memory; nothing was changed"
            )
            return dict.fromkeys(steps, failure)
        for index, adapter, task, result in zip(steps, adapters, tasks, results, strict=True):
            if not result.is_finite:
                outcomes[index] = InvalidRequest(
                    f"adam_params: this step would leave weights that are not finite (learning_rate "
                    f"{task.step.learning_rate}, eps {task.step.eps}); nothing was changed"
                )
                continue
            with torch.no_grad():
                torch._foreach_copy_(adapter.weights.flat(), result.parameters)
            adapter.optimizer = OptimizerState(result.exp_avg, result.exp_avg_sq, task.step_count)
            adapter.gradients = None
            outcomes[index] = OptimStepped({"grad_norm:max": result.grad_norm, "step:max": float(task.step_count)})
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


def _zeros(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(tensor, requires_grad=False) for tensor in tensors]


def _trainable(weights: LoraWeights) -> LoraWeights:
    for tensor in weights.flat():
        tensor.requires_grad_(True)
    return weights


def _waves(runs: Sequence[RunId]) -> list[list[int]]:
    """Indices such that no wave holds two of one run: their gradients must be told apart, their steps follow in order."""
    waves: list[list[int]] = []
    depth: dict[RunId, int] = {}
    for index, run in enumerate(runs):
        place = depth.get(run, 0)
        depth[run] = place + 1
        if place == len(waves):
            waves.append([])
        waves[place].append(index)
    return waves
