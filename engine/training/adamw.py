"""AdamW steps of many adapters at once, by the fused kernel of ``torch.optim.AdamW``.

AdamW: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization". Steps with equal hyperparameters share one call of
the kernel. An adapter is one vector, so a step's overhead does not grow with the number of projections.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.errors import InvalidRequest
from contracts.operations import OptimStep

_CLIP_EPSILON = 1e-6
"""Added to the norm before dividing by it, as in ``torch.nn.utils.clip_grad_norm_``."""
_LARGEST_NUMBER = 1e20
"""Largest hyperparameter. Bias correction divides by as little as 1e-16, and the quotient must still be a float32."""


@dataclass(frozen=True, slots=True)
class StepTask:
    """One adapter's step. The vectors are float32 (P,) and are not changed; ``step_count`` counts from 1.

    A dimuon step's second moment is shorter (``engine.training.muon``).

    ``step`` has passed ``check_step``.
    """

    parameters: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step_count: int
    step: OptimStep


@dataclass(frozen=True, slots=True)
class StepResult:
    """New vectors of a task, the gradient's norm before clipping, and whether norm and weights are finite."""

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad_norm: float
    is_finite: bool


@torch.no_grad()
def adamw_steps(tasks: Sequence[StepTask]) -> list[StepResult]:
    """Step ``tasks``, one or more, and return their results in order. No task's numbers depend on another's.

    Raises ``RuntimeError`` when the vectors of a task differ in length; the kernel itself would not notice.
    """
    for task in tasks:
        if len({tensor.shape for tensor in (task.parameters, task.gradient, task.exp_avg, task.exp_avg_sq)}) > 1:
            raise RuntimeError("an adapter's weights, gradient and moments differ in length")
    norms = torch.stack(list(torch._foreach_norm([task.gradient for task in tasks])))
    gradients = clipped(tasks, norms)
    news = [[tensor.clone() for tensor in (task.parameters, task.exp_avg, task.exp_avg_sq)] for task in tasks]
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, task in enumerate(tasks):
        step = task.step
        numbers = (step.learning_rate, step.beta1, step.beta2, step.eps, step.weight_decay)
        alike.setdefault(numbers, []).append(number)
    for (learning_rate, beta1, beta2, eps, weight_decay), members in alike.items():
        torch._fused_adamw_(
            [news[member][0] for member in members],
            [gradients[member] for member in members],
            [news[member][1] for member in members],
            [news[member][2] for member in members],
            [],
            [torch.tensor(float(tasks[member].step_count), device=norms.device) for member in members],
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    return _results(news, norms)


def check_step(step: OptimStep) -> None:
    """Raise ``InvalidRequest`` for hyperparameters with which AdamW is not defined in float32."""
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


def clipped(tasks: Sequence[StepTask], norms: Tensor) -> list[Tensor]:
    """Return the tasks' gradients, whose norms are ``norms`` (tasks,), each scaled to its bound where its norm exceeds it.

    Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks".
    """
    gradients = [task.gradient for task in tasks]
    if all(task.step.grad_clip_norm <= 0 for task in tasks):
        return gradients
    bounds = norms.new_tensor([task.step.grad_clip_norm for task in tasks])
    factors = torch.where(bounds > 0, (bounds / (norms + _CLIP_EPSILON)).clamp(max=1.0), 1.0).tolist()
    return list(torch._foreach_mul(gradients, factors))


def _results(news: Sequence[Sequence[Tensor]], norms: Tensor) -> list[StepResult]:
    """Return the results. Only weights are checked: the moments are weighted means, finite while the norm is."""
    broken = torch.zeros_like(norms)
    one = norms.new_ones(())
    for (weights, _, _), found in zip(news, broken.unbind(), strict=True):
        # The check of torch.amp.GradScaler: sets ``found`` where a value is not finite. The factor 1 changes nothing.
        torch._amp_foreach_non_finite_check_and_unscale_([weights], found, one)
    is_finite = (torch.isfinite(norms) & (broken == 0)).tolist()
    return [
        StepResult(weights, first, second, norm, finite)
        for (weights, first, second), norm, finite in zip(news, norms.tolist(), is_finite, strict=True)
    ]
