"""Default sizes for this machine: the tokens of one training pass, and the bytes of memory for adapters."""

import torch

from engine.machine_memory import available_memory
from engine.model.base import BaseModel

CPU_PASS_TOKENS, GPU_PASS_TOKENS = 2048, 16384
_ADAPTER_DIVISOR = 4
"""Adapters take a quarter of the free memory; passes, the sampler and the system need the rest."""


def default_pass_token_budget(base: BaseModel) -> int:
    """Return the number of tokens that keeps the device busy for a pass. With more, other tenants would only wait longer."""
    return GPU_PASS_TOKENS if base.device.type == "cuda" else CPU_PASS_TOKENS


def default_adapter_memory(base: BaseModel) -> int:
    """Return a quarter of the memory that is free on the base's device now, in bytes."""
    if base.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(base.device)
        return free // _ADAPTER_DIVISOR
    return available_memory() // _ADAPTER_DIVISOR
