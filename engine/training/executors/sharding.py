"""Shards the layers of a base over the ranks of a group, and keeps the ranks' weight gathers in lockstep.

FSDP2 (``fully_shard``; Zhao et al. 2023, "PyTorch FSDP") gathers a layer's weights from all ranks just before they are needed,
in the forward pass and again in the backward pass, and frees them afterwards. Embeddings, final norm and head stay whole on
every rank: the head is called in chunks, and the number of chunks differs between ranks.

A gather needs every rank. So every micro-batch has one fixed schedule of gathers: each layer in order and, with a backward
pass, each layer in reverse. A rank may leave gathers out: its micro-batch failed, it has no gradient to compute, or it has no
micro-batch at all. ``complete_gathers`` does the rest of the schedule without computing, and all ranks are in step again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from transformers import PreTrainedModel

from contracts.errors import InvalidRequest
from engine.model.base import BaseModel, decoder_stack


class _CountedAllGather(DefaultAllGather):
    """FSDP2's all-gather that counts the gathers begun on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        work = super().__call__(*inputs, **named)
        self.begun += 1
        return work


class ShardedLayers:
    """Sharded layers of one base on this rank. For one micro-batch and one thread at a time."""

    def __init__(self, stack: FSDPModule, layers: Sequence[FSDPModule], gathers: _CountedAllGather) -> None:
        self._stack = stack
        self._layers = layers
        self._gathers = gathers

    @classmethod
    def shard(cls, model: PreTrainedModel, mesh: DeviceMesh) -> "ShardedLayers":
        """Shard the layers of the frozen ``model`` over ``mesh``. Only one layer at a time is whole on the mesh's device.

        Raises ``InvalidRequest`` when the model has no stack of layers.
        """
        stack, layers = decoder_stack(model)
        if not layers:
            raise InvalidRequest("the base model has no stack of layers that a group could shard")
        gathers = _CountedAllGather()
        sharded = [fully_shard(layer, mesh=mesh, reshard_after_forward=True) for layer in layers]
        for layer in sharded:
            layer.set_custom_all_gather(gathers)
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        rest = {parameter for parameter in stack.parameters() if parameter not in inside}
        return cls(fully_shard(stack, mesh=mesh, ignored_params=rest), sharded, gathers)

    def check(self, base: BaseModel) -> None:
        """Raise ``InvalidRequest`` unless a forward computes the layers once each, in order. The schedule depends on it."""
        order: list[int] = []

        def note(number: int) -> Any:
            return lambda *_: order.append(number)

        modules = [layer for layer in self._layers if isinstance(layer, nn.Module)]
        hooks = [layer.register_forward_pre_hook(note(number)) for number, layer in enumerate(modules)]
        self._gathers.begun = 0
        try:
            with torch.no_grad():
                base.hidden_states(torch.zeros(1, 2, dtype=torch.int64, device=base.device))
        finally:
            for hook in hooks:
                hook.remove()
        if order != list(range(len(self._layers))) or self._gathers.begun != len(self._layers):
            raise InvalidRequest(f"base model {base.facts.name!r} does not compute its layers in order, once each")
        self.complete_gathers(backward=False)

    @torch.no_grad()
    def complete_gathers(self, *, backward: bool) -> None:
        """Do the gathers of a micro-batch that this rank has left out, and free every gathered weight.

        Raises ``RuntimeError`` when another rank is gone, or this rank has begun more gathers than the schedule has.
        """
        schedule = [*self._layers, *reversed(self._layers)] if backward else self._layers
        if self._gathers.begun > len(schedule):
            raise RuntimeError(f"{self._gathers.begun} gathers in a micro-batch of {len(schedule)}")
        # Needed even after success: a forward without a backward leaves FSDP2's prefetch order behind.
        self._stack.reset_iter_state()
        for layer in schedule[self._gathers.begun :]:
            layer.unshard()
            layer.reshard()
        self._gathers.begun = 0
