"""Bounds of what can be sampled from a base model, by the settings of its samplers: known before a sample is sent."""

from dataclasses import replace

from contracts.adapted_heads import ADAPTED_HEADS
from contracts.base_model import BaseModelFacts
from contracts.errors import InvalidRequest
from store.settings import Settings


def samples_on_vllm(settings: Settings, base_model: str) -> bool:
    """Return whether vLLM servers sample the base model; otherwise weft's own process does."""
    # An entry is ``[NAME=]URL[#REPLICA]``.
    names = [spec.partition("://")[0].rpartition("=")[0] for spec in settings.vllm_urls]
    return settings.vllm_replicas > 0 or any(name in ("", base_model) for name in names)


def sampled_facts(settings: Settings, facts: BaseModelFacts) -> BaseModelFacts:
    """Return the facts of the base model as it is sampled: vLLM's context may be shorter than the base's own."""
    if settings.vllm_context_length is None or not samples_on_vllm(settings, facts.name):
        return facts
    return replace(facts, context_length=min(facts.context_length, settings.vllm_context_length))


def takes_head(settings: Settings, facts: BaseModelFacts) -> bool:
    """Return whether vLLM servers of the base model take adapters that change the output head."""
    asked = settings.vllm_head_adapters
    return facts.architecture in ADAPTED_HEADS if asked is None else asked


def check_can_be_sampled(settings: Settings, facts: BaseModelFacts, *, rank: int, trains_head: bool) -> None:
    """Raise ``InvalidRequest`` if the samplers of the base model take no adapter of this rank, or none with a head."""
    base_model = facts.name
    if not samples_on_vllm(settings, base_model):
        return
    if rank > settings.max_rank:
        raise InvalidRequest(
            f"the adapter's rank is {rank}, and the samplers of {base_model} take up to {settings.max_rank}: train one of a "
            "lower rank, or ask the operator to raise WEFT_MAX_RANK"
        )
    if trains_head and not takes_head(settings, facts):
        way = ", or ask the operator to set WEFT_VLLM_HEAD_ADAPTERS" if facts.architecture in ADAPTED_HEADS else ""
        raise InvalidRequest(
            f"the adapter changes the output head, and the samplers of {base_model} take none that does: train with "
            f"train_unembed=False{way}"
        )
