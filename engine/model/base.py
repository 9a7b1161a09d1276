"""A frozen base model that many LoRA adapters share.

Hooks on its projections (linear layers) add the low-rank part of the adapters that are active in the calling thread. So a
trainer and a sampler can use one copy of the weights at the same time.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from contracts.operations import LoraSettings
from engine.model.base_outline import BaseOutline, ModelNames, WeightDigest
from engine.model.device_choice import choose_device
from engine.model.device_turns import DeviceTurns
from engine.model.input_layout import InputLayout, observe_layouts, restore_rows
from engine.model.lora import AdapterSegment, AdapterSegments, LoraLayout, Projection, ProjectionGroup, layout_of
from engine.model.rotary import freeze_rotary
from engine.model.routers import ROUTERS
from engine.model.skeleton import names_of

log = logging.getLogger(__name__)

_LAYER = re.compile(r"\.\d+\.")
_ATTENTION = re.compile(r"(^|[._])(self_?)?(attn|attention)", re.IGNORECASE)
_PROBE_ROWS, _PROBE_LENGTH = 2, 3


class LowRank(Protocol):
    """Active adapters, as the hooks see them."""

    def add(self, name: str, inputs: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` (rows, …, out) of projection ``name`` plus the low-rank part of ``inputs`` (rows, …, in)."""


class BaseModel:
    """A frozen causal language model. The first dimension of every projection's input is the rows of the batch."""

    def __init__(
        self, facts: BaseModelFacts, model: PreTrainedModel, *, gradient_checkpointing: bool | None = None
    ) -> None:
        self.facts = facts
        self.model = model
        self.device = next(model.parameters()).device
        self.turns = DeviceTurns(one_at_a_time=self.device.type != "cpu")
        """Turns of training passes and scores on the device. The sampler keeps to memory of its own."""
        self._active: ContextVar[LowRank | None] = ContextVar(f"adapters of {facts.name}", default=None)
        freeze_rotary(model, facts.context_length)
        modules = dict(model.named_modules())
        candidates = _find_projections(model)
        probe = torch.arange(_PROBE_ROWS * _PROBE_LENGTH, device=self.device) % facts.vocabulary_size
        probe = probe.view(_PROBE_ROWS, _PROBE_LENGTH)
        layouts, logits = observe_layouts(model, list(candidates), probe)
        self.projections: Mapping[str, Projection] = _usable_projections(facts, candidates, layouts)
        flattened = [modules[name] for name in self.projections if layouts[name] is InputLayout.FLATTENED]
        restore_rows(model, model.base_model, flattened)
        _warn_of_bare_experts(facts, model, self.projections)
        self.linear_names = frozenset(
            name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)
        )
        for name in self.projections:
            modules[name].register_forward_hook(self._hook(name))
        self.output_name = next((name for name, p in self.projections.items() if p.group == "unembed"), None)
        """Name of the unembedding, None when it is no linear layer that adapters may change."""
        self.has_plain_head = self._is_plain_head(probe, logits)
        """True when ``head(hidden_states(x))`` equals the model's own logits. If false, use ``logits``."""
        if self.device.type != "cpu" if gradient_checkpointing is None else gradient_checkpointing:
            for layer in decoder_stack(model)[1]:
                _checkpoint(layer)

    @classmethod
    def load(
        cls,
        facts: BaseModelFacts,
        *,
        dtype: str = "auto",
        device: str = "auto",
        gradient_checkpointing: bool | None = None,
    ) -> Self:
        """Load the folder ``facts.path``; ``dtype`` auto keeps the checkpoint's, ``device`` auto prefers CUDA.

        ``gradient_checkpointing`` keeps a layer's input only and computes the layer again in the backward pass; None: on an
        accelerator, where activations of a full pass are several times the base.
        Raises ``InvalidRequest`` when the folder cannot be loaded or lacks attention or MLP projections.
        """
        if device == "auto":
            device = choose_device()
        model = read_model(facts, dtype=dtype).to(device)
        log.info("base %s is on %s, of %s", facts.name, device, str(model.dtype).removeprefix("torch."))
        return cls(facts, model, gradient_checkpointing=gradient_checkpointing)

    @property
    def name(self) -> str:
        """The base's served name."""
        return self.facts.name

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the frozen weights."""
        found: torch.dtype = self.model.dtype
        return found

    def layout(self, settings: LoraSettings) -> LoraLayout:
        """Return the layout of an adapter with these settings; it is empty when the settings leave nothing to train."""
        return layout_of(settings, self.projections.values())

    @contextmanager
    def adapters(self, adapters: Sequence[AdapterSegment] | LowRank) -> Iterator[None]:
        """Make ``adapters`` active in this thread for the ``with`` block. Rows of no segment use the bare base."""
        token = self._active.set(AdapterSegments(tuple(adapters)) if isinstance(adapters, Sequence) else adapters)
        try:
            yield
        finally:
            self._active.reset(token)

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return the final hidden states (rows, length, hidden) of ``input_ids`` int64 (rows, length), causal attention."""
        output = self.model.base_model(input_ids=input_ids, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    def head(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (..., V) of final hidden states (..., hidden), soft capping and scaling included.

        Both are computed in the head's own type, as in transformers: in bfloat16 they round by more than the probe allows.
        """
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits.float()

    def logits(self, input_ids: Tensor) -> Tensor:
        """Return float32 logits (rows, length, V) of ``input_ids`` int64 (rows, length), by the model's own forward."""
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits.float()

    @property
    def has_tied_head(self) -> bool:
        """True when the output layer's weight is the embedding's."""
        return bool(getattr(self.model.config.get_text_config(), "tie_word_embeddings", False))

    def is_own_head(self, weight: Tensor) -> bool:
        """Tell whether ``weight`` equals the output layer's own."""
        own = self._head_weight
        return own is not None and own.shape == weight.shape and torch.equal(own, weight.to(own))

    @cached_property
    def outline(self) -> BaseOutline:
        """The base without its weights. Blocking: at first, the output layer's weight is read whole."""
        head = self._head_weight
        return BaseOutline(
            self.name,
            tuple(self.projections.values()),
            self.linear_names,
            self.output_name,
            self.is_conv1d,
            None if head is None else WeightDigest.of(head),
        )

    @property
    def names(self) -> ModelNames:
        """Names of the model's layers, for merges. Blocking: the headers of its files are read."""
        return names_of(self.model, self.facts.path)

    @property
    def _head_weight(self) -> Tensor | None:
        """Weight of the output layer, None where adapters cannot change it."""
        if self.output_name is None:
            return None
        weight: Tensor = self.model.get_submodule(self.output_name).weight
        return weight

    @property
    def is_conv1d(self) -> bool:
        """True when projections store their weight transposed, as in GPT-2 (PEFT's ``fan_in_fan_out``)."""
        modules = dict(self.model.named_modules())
        return any(isinstance(modules[name], Conv1D) for name in self.projections)

    def _hook(self, name: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            active = self._active.get()
            return active.add(name, inputs[0], output) if active is not None else None

        return add

    @torch.no_grad()
    def _is_plain_head(self, input_ids: Tensor, logits: Tensor) -> bool:
        if self.model.base_model is not self.model:
            ours = self.head(self.hidden_states(input_ids))
            if ours.shape == logits.shape and torch.allclose(ours, logits.float(), rtol=1e-3, atol=1e-3):
                return True
        log.warning(
            "base model %s has a head of its own kind: passes hold a sequence's logits whole, and are slower for it",
            self.facts.name,
        )
        return False


def read_model(facts: BaseModelFacts, *, dtype: str) -> PreTrainedModel:
    """Load the frozen model in the folder ``facts.path``, on the CPU. Raises ``InvalidRequest`` when it cannot be loaded."""
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(facts.path), dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidRequest(f"base model {facts.name!r} cannot be loaded: {error}") from error
    model.requires_grad_(False)
    return model.eval()


def decoder_stack(model: PreTrainedModel) -> tuple[nn.Module, Sequence[nn.Module]]:
    """Return the module whose forward computes the stack of layers, and the layers: the model's longest list of modules."""
    stacks = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not stacks:
        return model, []
    name, layers = max(stacks, key=lambda stack: len(stack[1]))
    return model.get_submodule(name.rpartition(".")[0]), list(layers)


def _checkpoint(layer: nn.Module) -> None:
    """Have ``layer`` keep only its inputs for the backward pass, which computes the layer again."""
    forward = layer.forward

    def forward_again(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        # An accelerator's backward runs in another thread, where this thread's adapters are not active.
        in_context = partial(copy_context().run, forward)
        return checkpoint(in_context, *inputs, use_reentrant=False, **named)

    layer.forward = forward_again


def _find_projections(model: PreTrainedModel) -> dict[str, Projection]:
    """Return the linear layers by name, with their group told from the name and not from a list of architectures."""
    output = model.get_output_embeddings()
    projections: dict[str, Projection] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            in_features, out_features = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            in_features, out_features = module.nx, module.nf
        else:
            continue
        group: ProjectionGroup
        if module is output:
            group = "unembed"
        elif not _LAYER.search(name) or name.rpartition(".")[2] in ROUTERS:
            continue
        else:
            group = "attn" if _ATTENTION.search(name) else "mlp"
        projections[name] = Projection(name, group, in_features, out_features)
    return projections


def _usable_projections(
    facts: BaseModelFacts, candidates: Mapping[str, Projection], layouts: Mapping[str, InputLayout]
) -> dict[str, Projection]:
    """Return the projections whose inputs tell their rows.

    Raises ``InvalidRequest`` when no projection of a layer is left.
    """
    projections = {
        name: projection
        for name, projection in candidates.items()
        if layouts[name] is InputLayout.ROWS
        or (layouts[name] is InputLayout.FLATTENED and projection.group != "unembed")
    }
    if not {"attn", "mlp"} & {projection.group for projection in projections.values()}:
        raise InvalidRequest(
            f"base model {facts.name!r} ({facts.architecture}) has no projections as linear layers over all tokens; weft "
            "trains LoRA on linear attention and MLP layers, not on routed experts"
        )
    return projections


def _warn_of_bare_experts(facts: BaseModelFacts, model: PreTrainedModel, projections: Mapping[str, Projection]) -> None:
    """Log how much of the layers' weights are those of experts that no adapter changes."""
    layers = {name: tensor.numel() for name, tensor in model.named_parameters() if _LAYER.search(name)}
    bare = [
        count
        for name, count in layers.items()
        if "experts" in name.split(".") and name.rpartition(".")[0] not in projections
    ]
    if bare:
        log.warning(
            "base model %s has routed experts, which adapters do not change: %d %% of its layers' weights",
            facts.name,
            round(100 * sum(bare) / sum(layers.values())),
        )
