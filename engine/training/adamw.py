"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019), operation by operation as ``torch.optim.AdamW``.

Steps of many adapters run as one sequence of multi-tensor operations, each tensor with its own adapter's numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.contracts.errors import InvalidRequest
from engine.contracts.operations import OptimStep

_CLIP_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""
_LARGEST_NUMBER = 1e20
"""Bias correction divides by as little as 1e-16: what comes of it must still be a float32."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class AdamWTask:
    """One adapter's step: float32 tensors in one order, ``step_count`` counted from 1. Nothing here is changed.

    ``step`` has passed ``check_step``.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avg: Sequence[Tensor]
    exp_avg_sq: Sequence[Tensor]
    step_count: int
    step: OptimStep


@dataclass(frozen=True, slots=True)
class AdamWResult:
    """New tensors of a task, ``grad_norm`` before clipping, and whether all of it is finite."""

    parameters: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    grad_norm: float
    is_finite: bool


@torch.no_grad()
def adamw_steps(tasks: Sequence[AdamWTask]) -> list[AdamWResult]:
    """Results of ``tasks``, one or more, in order; no task's numbers depend on another's."""
    gradients = [gradient for task in tasks for gradient in task.gradients]
    norms = _per_task(tasks, torch._foreach_norm(gradients), torch.linalg.vector_norm)
    bounds = norms.new_tensor([task.step.grad_clip_norm for task in tasks])
    factors = torch.where(bounds > 0, (bounds / (norms + _CLIP_EPSILON)).clamp(max=1.0), 1.0).tolist()
    if any(factor != 1.0 for factor in factors):
        gradients = list(torch._foreach_mul(gradients, _spread(tasks, factors)))

    first = list(
        torch._foreach_lerp(
            [tensor for task in tasks for tensor in task.exp_avg],
            gradients,
            _each(tasks, lambda task: 1 - task.step.beta1),
        )
    )
    second = list(
        torch._foreach_mul(
            [tensor for task in tasks for tensor in task.exp_avg_sq], _each(tasks, lambda task: task.step.beta2)
        )
    )
    torch._foreach_addcmul_(second, gradients, gradients, _each(tasks, lambda task: 1 - task.step.beta2))
    denominators = list(torch._foreach_sqrt(second))
    torch._foreach_div_(denominators, _each(tasks, lambda task: math.sqrt(1 - task.step.beta2**task.step_count)))
    torch._foreach_add_(denominators, _each(tasks, lambda task: task.step.eps))
    weights = [tensor.detach() for task in tasks for tensor in task.parameters]
    kept = _each(tasks, lambda task: 1 - task.step.learning_rate * task.step.weight_decay)
    if any(factor != 1 for factor in kept):
        weights = list(torch._foreach_mul(weights, kept))
    rates = _each(tasks, lambda task: -task.step.learning_rate / (1 - task.step.beta1**task.step_count))
    weights = list(torch._foreach_addcdiv(weights, first, denominators, rates))
    return _results(tasks, (weights, first, second), norms)


def check_step(step: OptimStep) -> None:
    """Raise ``InvalidRequest`` for numbers with which AdamW is not defined in float32."""
    decay = step.learning_rate * step.weight_decay
    for name, value in (
        ("learning_rate", step.learning_rate),
        ("eps", step.eps),
        ("weight_decay", step.weight_decay),
        ("learning_rate times weight_decay", decay),
    ):
        if not 0 <= value <= _LARGEST_NUMBER:
            raise InvalidRequest(f"adam_params.{name} must be 0 to {_LARGEST_NUMBER:g}; got {value}")
    for name, value in (("beta1", step.beta1), ("beta2", step.beta2)):
        if not 0 <= value < 1:
            raise InvalidRequest(f"adam_params.{name} must be at least 0 and below 1; got {value}")
    if not math.isfinite(step.grad_clip_norm):
        raise InvalidRequest(f"adam_params.grad_clip_norm must be a finite number; got {step.grad_clip_norm}")


def _results(tasks: Sequence[AdamWTask], tensors: tuple[list[Tensor], ...], norms: Tensor) -> list[AdamWResult]:
    """Cut ``tensors`` by task. The moments are weighted means of finite numbers: only weights can become infinite."""
    parts = []
    broken = torch.zeros_like(norms)
    one, at = norms.new_ones(()), 0
    for task, found in zip(tasks, broken.unbind(), strict=True):
        end = at + len(task.parameters)
        parts.append([group[at:end] for group in tensors])
        # What torch.amp.GradScaler asks of gradients: sets ``found`` at a value that is not finite; times 1 is itself.
        torch._amp_foreach_non_finite_check_and_unscale_(parts[-1][0], found, one)
        at = end
    is_finite = torch.isfinite(norms) & (broken == 0)
    return [
        AdamWResult(weights, first, second, norm, finite)
        for (weights, first, second), norm, finite in zip(parts, norms.tolist(), is_finite.tolist(), strict=True)
    ]


def _each(tasks: Sequence[AdamWTask], number: Callable[[AdamWTask], float]) -> list[float]:
    """The task's number for each of its tensors."""
    return _spread(tasks, [number(task) for task in tasks])


def _spread(tasks: Sequence[AdamWTask], values: Sequence[Value]) -> list[Value]:
    return [value for task, value in zip(tasks, values, strict=True) for _ in task.parameters]


def _per_task(tasks: Sequence[AdamWTask], values: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """``reduce`` of each task's scalars, (tasks,)."""
    groups = torch.split(torch.stack(list(values)), [len(task.parameters) for task in tasks])
    return torch.stack([reduce(group) for group in groups])
