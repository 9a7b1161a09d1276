"""Training state of one adapter (weights, gradient, moments) as a value, and the one file it is paged out to.

    state.safetensors    weights, gradient, exp_avg, exp_avg_sq as vectors; metadata: format, base, LoRA settings, step,
                         optimizer

A state is never changed: a pass or step makes a new one. A save therefore needs no copy, and training may go on meanwhile.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings, OptimizerName
from engine.model.atomic_folder import write_atomically
from engine.model.base import BaseModel
from engine.model.lora import LoraLayout, LoraWeights
from engine.model.unreadable import why_unreadable
from engine.training.muon import head_size

STATE = "state.safetensors"
FORMAT = "weft-adapter-state-1"


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """First and second moments, float32 (layout.size,) each, and the number of steps taken.

    Dimuon has the momentum as first moment, and a second moment of the head only, float32 (head_size(layout),).
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int
    name: OptimizerName = OptimizerName.ADAMW

    @classmethod
    def fresh(cls, name: OptimizerName, weights: LoraWeights) -> Self:
        """Return the state before the first step."""
        vector = weights.vector
        sizes = second_moment_size(name, weights.layout)
        return cls(torch.zeros_like(vector), vector.new_zeros(sizes), step=0, name=name)


def second_moment_size(name: OptimizerName, layout: LoraLayout) -> int:
    """Return the number of elements of the second moment."""
    return head_size(layout) if name is OptimizerName.DIMUON else layout.size


@dataclass(frozen=True, slots=True)
class AdapterState:
    """State of one adapter. ``gradient`` is float32 (layout.size,); it and ``optimizer`` are None while they are zero."""

    weights: LoraWeights
    gradient: Tensor | None = None
    optimizer: OptimizerState | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state's tensors."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"weights": self.weights.vector}
        if self.gradient is not None:
            tensors["gradient"] = self.gradient
        if self.optimizer is not None:
            tensors |= {"exp_avg": self.optimizer.exp_avg, "exp_avg_sq": self.optimizer.exp_avg_sq}
        return tensors


def largest_nbytes(base: BaseModel, settings: LoraSettings) -> int:
    """Return the bytes of an adapter's state with gradient and moments: AdamW's, which no other optimizer exceeds."""
    return 4 * 4 * base.layout(settings).size


def write_state(directory: Path, base: BaseModel, state: AdapterState) -> int:
    """Write the state to a new folder and return the folder's size in bytes.

    Raises ``OSError`` (a full disk), leaving nothing behind.
    """
    described = {
        "format": FORMAT,
        "base_model": base.facts.name,
        "lora": json.dumps(asdict(state.weights.settings)),
        "step": str(state.optimizer.step if state.optimizer else 0),
        "optimizer": state.optimizer.name if state.optimizer else OptimizerName.ADAMW,
    }
    tensors = {name: tensor.cpu() for name, tensor in state._tensors().items()}
    return write_atomically(directory, lambda folder: save_file(tensors, folder / STATE, described))


def read_state(directory: Path, base: BaseModel) -> AdapterState:
    """Read the state in a folder, bit-equal, onto the base's device.

    Raises ``InvalidRequest`` when the file is gone, damaged, of another format or does not fit the base, ``FilesUnread`` when
    its folder cannot be reached.
    """
    try:
        with safe_open(directory / STATE, framework="pt", device=str(base.device)) as file:
            described: Mapping[str, str] = file.metadata() or {}
            # Copied: a tensor of a file begins where the header ends, and a CPU's kernels round by how memory is aligned.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        settings = LoraSettings(**json.loads(described["lora"]))
        weights = LoraWeights(settings, base.layout(settings), tensors.pop("weights"))
        gradient = tensors.pop("gradient", None)
        step = int(described["step"])
        optimizer = OptimizerName(described.get("optimizer", OptimizerName.ADAMW))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        damaged = InvalidRequest("the adapter's state cannot be read: its file is missing or damaged")
        raise why_unreadable(directory / STATE, error, damaged) from error
    sizes = {"exp_avg": weights.layout.size, "exp_avg_sq": second_moment_size(optimizer, weights.layout)}
    found = [(weights.vector, weights.layout.size)]
    found += [] if gradient is None else [(gradient, weights.layout.size)]
    found += [(tensor, sizes.get(name, 0)) for name, tensor in tensors.items()]
    if described.get("format") != FORMAT or any(tensor.shape != (size,) for tensor, size in found):
        raise InvalidRequest(f"the adapter's state does not fit base model {base.facts.name!r} or this weft")
    if not tensors:
        return AdapterState(weights, gradient)
    return AdapterState(weights, gradient, OptimizerState(tensors["exp_avg"], tensors["exp_avg_sq"], step, optimizer))
