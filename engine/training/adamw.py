"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019), operation by operation as ``torch.optim.AdamW``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contracts.operations import OptimStep

_CLIP_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], max_norm: float) -> Tensor:
    """Scale ``gradients`` in place to a global 2-norm of at most ``max_norm`` (<= 0: leave them); returns the norm before."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    if max_norm > 0:
        torch._foreach_mul_(list(gradients), torch.clamp(max_norm / (norm + _CLIP_EPSILON), max=1.0))
    return norm


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    step_count: int,
    step: OptimStep,
) -> None:
    """Update float32 ``parameters`` and both moments in place; ``step_count`` counts from 1."""
    weights, grads = [parameter.detach() for parameter in parameters], list(gradients)
    first, second = list(exp_avg), list(exp_avg_sq)
    if step.weight_decay != 0:
        torch._foreach_mul_(weights, 1 - step.learning_rate * step.weight_decay)
    torch._foreach_lerp_(first, grads, 1 - step.beta1)
    torch._foreach_mul_(second, step.beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - step.beta2)
    correction1 = 1 - step.beta1**step_count
    correction2 = math.sqrt(1 - step.beta2**step_count)
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, correction2)
    torch._foreach_add_(denominators, step.eps)
    torch._foreach_addcdiv_(weights, first, denominators, -step.learning_rate / correction1)
