"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019), operation by operation as ``torch.optim.AdamW``.

Steps of many adapters run as one sequence of multi-tensor operations, each tensor with its own adapter's numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine.contracts.operations import OptimStep

_CLIP_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class AdamWTask:
    """One adapter's step: float32 tensors in one order, ``step_count`` counted from 1. Nothing here is changed."""

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
    weights = list(
        torch._foreach_mul(
            [tensor.detach() for task in tasks for tensor in task.parameters],
            _each(tasks, lambda task: 1 - task.step.learning_rate * task.step.weight_decay),
        )
    )
    torch._foreach_addcdiv_(
        weights,
        first,
        denominators,
        _each(tasks, lambda task: -task.step.learning_rate / (1 - task.step.beta1**task.step_count)),
    )
    largest = [_per_task(tasks, torch._foreach_norm(group, math.inf), torch.sum) for group in (weights, first, second)]
    return _results(tasks, (weights, first, second), norms, torch.stack([norms, *largest]).isfinite().all(0))


def _results(
    tasks: Sequence[AdamWTask], tensors: tuple[list[Tensor], ...], norms: Tensor, is_finite: Tensor
) -> list[AdamWResult]:
    results, at = [], 0
    for task, norm, finite in zip(tasks, norms.tolist(), is_finite.tolist(), strict=True):
        end = at + len(task.parameters)
        weights, first, second = (group[at:end] for group in tensors)
        results.append(AdamWResult(weights, first, second, norm, finite))
        at = end
    return results


def _each(tasks: Sequence[AdamWTask], number: Callable[[AdamWTask], float]) -> list[float]:
    """The task's number for each of its tensors."""
    return _spread(tasks, [number(task) for task in tasks])


def _spread(tasks: Sequence[AdamWTask], values: Sequence[Value]) -> list[Value]:
    return [value for task, value in zip(tasks, values, strict=True) for _ in task.parameters]


def _per_task(tasks: Sequence[AdamWTask], values: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """``reduce`` of each task's scalars, (tasks,)."""
    groups = torch.split(torch.stack(list(values)), [len(task.parameters) for task in tasks])
    return torch.stack([reduce(group) for group in groups])
