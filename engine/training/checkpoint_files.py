"""Training checkpoints on disk: a PEFT adapter folder, plus the optimizer state that is needed to go on training.

adapter_config.json, adapter_model.safetensors, weft.json   the adapter (``engine.model.adapter_folder``)
optimizer.safetensors                                       first and second moments, step count
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from contracts.operations import OptimizerName
from engine.model.adapter_folder import (
    damaged,
    matrices_by_key,
    read_lora_weights,
    read_tensors,
    vector_from_keys,
    write_adapter_files,
)
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.lora import LoraWeights
from engine.model.unreadable import has_file
from engine.training.adapter_state import AdapterState, OptimizerState
from engine.training.muon import head_size

OPTIMIZER = "optimizer.safetensors"
_STEP = "step"
_MOST_STEPS = 2**53
"""Largest step count: the largest number up to which a float64, as of metrics, has every whole one."""
_HEAD_MOMENT = "exp_avg_sq"
"""Second moment of a dimuon state; tells it from AdamW's, whose second moment is a tensor for each matrix."""


def write_checkpoint(directory: Path, base: BaseModel, state: AdapterState, *, optimizer: bool) -> int:
    """Write the weights, and with ``optimizer`` the optimizer state, and return the folder's size in bytes.

    Only reads ``state``, so training may go on meanwhile. Raises ``OSError`` (a full disk), leaving nothing behind.
    """
    return write_atomically(directory, lambda folder: _fill(folder, base, state, optimizer=optimizer))


def _fill(folder: Path, base: BaseModel, state: AdapterState, *, optimizer: bool) -> None:
    write_adapter_files(folder, base, state.weights)
    if optimizer and state.optimizer is not None:
        moments = {_STEP: torch.tensor(state.optimizer.step)}
        kinds = ("exp_avg", "exp_avg_sq") if state.optimizer.name is OptimizerName.ADAMW else ("exp_avg",)
        for kind in kinds:
            found = matrices_by_key(state.weights.layout, getattr(state.optimizer, kind))
            moments |= {f"{kind}.{key}": tensor for key, tensor in found.items()}
        if state.optimizer.name is OptimizerName.DIMUON:
            moments[_HEAD_MOMENT] = state.optimizer.exp_avg_sq.cpu()
        save_file(moments, folder / OPTIMIZER)


def read_checkpoint(directory: Path, base: BaseModel, *, optimizer: bool) -> AdapterState:
    """Read the adapter in a folder, weft's or plain PEFT's. With ``optimizer``, read its optimizer state too, if there is one.

    Raises ``InvalidRequest`` when the folder is no LoRA adapter, or does not fit the base, and ``FilesUnread``.
    """
    weights = read_lora_weights(directory, base)
    return AdapterState(weights, optimizer=_read_optimizer(directory, weights) if optimizer else None)


def _read_optimizer(directory: Path, weights: LoraWeights) -> OptimizerState | None:
    """Read the optimizer state; None if the folder has none. Raises ``InvalidRequest`` when it does not fit ``weights``."""
    path = directory / OPTIMIZER
    if not has_file(path):
        return None
    tensors = read_tensors(path, str(weights.vector.device))
    if _STEP not in tensors:
        raise damaged()
    if _HEAD_MOMENT in tensors:
        momentum, second = vector_from_keys(weights.layout, tensors, "exp_avg."), tensors[_HEAD_MOMENT]
        if second.shape != (head_size(weights.layout),):
            raise damaged()
        return OptimizerState(momentum, second, _step_of(tensors[_STEP]), OptimizerName.DIMUON)
    return OptimizerState(
        exp_avg=vector_from_keys(weights.layout, tensors, "exp_avg."),
        exp_avg_sq=vector_from_keys(weights.layout, tensors, "exp_avg_sq."),
        step=_step_of(tensors[_STEP]),
    )


def _step_of(tensor: Tensor) -> int:
    """Return the step count. Raises ``InvalidRequest`` for a number that none can be."""
    found = tensor.item() if tensor.numel() == 1 else None
    if not isinstance(found, int | float) or not 0 <= found <= _MOST_STEPS or found != int(found):
        raise damaged()
    return int(found)
