"""Dimuon steps by the rule of ``torch.optim.Muon``: momentum whose matrices are made orthogonal.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; learning rate by shape: Liu et al. 2025, "Muon
is Scalable for LLM Training", so that one learning rate fits the matrices and the head. An adapter's A and B are stepped by
this rule with Nesterov momentum ``beta1`` and no weight decay. The head's A and B are stepped by AdamW, as that rule leaves the
output layer to it.

Matrices of one shape are computed in one product, but never those of two adapters: no neighbour can change a bit.
"""

import math

import torch
from torch import Tensor

from contracts.operations import OptimStep
from engine.model.lora import LoraLayout
from engine.training.adamw import StepResult, StepTask, adamw_steps, clipped

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7
"""Coefficients of the quintic Newton-Schulz iteration, its steps and its least norm: the defaults of ``torch.optim.Muon``."""
_MATCHED_RMS = 0.2
"""Root mean square of an AdamW update, which the step's size matches: ``match_rms_adamw`` of ``torch.optim.Muon``."""


def head_size(layout: LoraLayout) -> int:
    """Return the number of elements that AdamW steps, the length of a dimuon state's second moment."""
    size: int = layout.head.stop - layout.head.start
    return size


@torch.no_grad()
def dimuon_step(task: StepTask, layout: LoraLayout) -> StepResult:
    """Step one adapter and return its new vectors. ``task.exp_avg_sq`` is that of the head, float32 (head_size,).

    ``task.exp_avg`` is the momentum, and at the head AdamW's first moment. The step's ``beta2`` and ``eps`` are the head's.
    """
    step, head = task.step, layout.head
    norm = torch.linalg.vector_norm(task.gradient)
    (gradient,) = clipped([task], norm[None])
    momentum = task.exp_avg.lerp(gradient, 1 - step.beta1)
    update = gradient.lerp(momentum, step.beta1)
    parameters = task.parameters.clone()
    for matrices, places in _by_shape(layout, update):
        rows, columns = matrices.shape[1:]
        rate = step.learning_rate * _MATCHED_RMS * math.sqrt(max(rows, columns))
        for matrix, place in zip(_orthogonal(matrices), places, strict=True):
            parameters[place].add_(matrix.reshape(-1), alpha=-rate)
    moments = task.exp_avg_sq
    if head_size(layout):
        inner = OptimStep(step.learning_rate, step.beta1, step.beta2, step.eps)
        old = StepTask(task.parameters[head], gradient[head], task.exp_avg[head], moments, task.step_count, inner)
        (new,) = adamw_steps([old])
        parameters[head], momentum[head], moments = new.parameters, new.exp_avg, new.exp_avg_sq
    is_finite = bool(torch.isfinite(norm) & torch.isfinite(parameters).all())
    return StepResult(parameters, momentum, moments, float(norm), is_finite)


def _by_shape(layout: LoraLayout, vector: Tensor) -> list[tuple[Tensor, list[slice]]]:
    """Return the matrices outside the head by shape, (matrices, rows, columns) each, with their places in the vector."""
    places: dict[torch.Size, list[slice]] = {}
    at = 0
    for name, shapes in layout.shapes().items():
        for shape in shapes:
            if name not in layout.head_names:
                places.setdefault(shape, []).append(slice(at, at + shape.numel()))
            at += shape.numel()
    return [(torch.stack([vector[place].view(shape) for place in found]), found) for shape, found in places.items()]


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearly orthogonal factors of ``matrices`` (matrices, rows, columns), bfloat16, by Newton-Schulz iteration."""
    first, second, third = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.bfloat16().mT if is_tall else matrices.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = found @ found.mT
        change = torch.baddbmm(gram, gram, gram, beta=second, alpha=third)
        found = torch.baddbmm(found, change, found, beta=first)
    return found.mT if is_tall else found
