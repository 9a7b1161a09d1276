"""A generate request on a vLLM server: its sequences, its event stream and the JSON that vLLM gets."""

import asyncio
from collections.abc import Callable
from typing import Any

from contracts.errors import InvalidRequest
from contracts.logit_rules import Grammar, LogitRules
from engine.sampling.event_stream import EventStream
from engine.sampling.replica import GenerateRequest
from engine.sampling.request_checks import check_request
from engine.sampling.vllm.logprobs import likely_asked
from engine.sampling.vllm.sequence import VllmSequence
from engine.sampling.vllm.settings import VllmReplicaSettings

# vLLM takes -1 for no seed, and no more than 63 bits.
_SEEDS = 2**63


class VllmRequest:
    """One call of ``generate`` until it returns."""

    def __init__(self, request: GenerateRequest, heard: Callable[[], None]) -> None:
        self.request = request
        self.stream = EventStream()
        self.sequences = [VllmSequence(index, request.topk, self.stream, heard) for index in range(len(request.seeds))]
        self.task: asyncio.Task[None] | None = None
        self.is_drawing = False
        self.is_on_server = True
        """False while the request waits for the trainer's forward, and needs nothing of the server."""

    @property
    def is_live(self) -> bool:
        """True while any sequence may bring tokens."""
        return any(sequence.is_live for sequence in self.sequences)

    def chosen(self, index: int | None) -> list[VllmSequence]:
        """Return sequence ``index``, or every sequence for None. Raises ``InvalidRequest`` for an index out of range."""
        if index is None:
            return self.sequences
        if not 0 <= index < len(self.sequences):
            raise InvalidRequest(f"request {self.request.request_id} has no sequence {index}")
        return [self.sequences[index]]

    def sequence_body(self, index: int, model: str, vocabulary_size: int) -> dict[str, Any]:
        """Return the JSON to POST for sequence ``index``."""
        asked = self.request
        seed = asked.seeds[index]
        params: dict[str, Any] = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "seed": None if seed is None else seed % _SEEDS,
            # vLLM refuses ids outside the vocabulary. Dropping them changes nothing: no such token is ever drawn.
            "stop_token_ids": sorted(token for token in asked.stop_tokens if 0 <= token < vocabulary_size),
            # Only the stop tokens end a sequence. A caller who wants the end-of-sequence tokens to end it adds them to these.
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": likely_asked(asked.topk),
            "stream_interval": asked.tokens_at_a_time,
        }
        params |= _rule_params(asked.logit_rules)
        return self._body(model, params) | {"stream": True, "stream_options": {"include_usage": True}}

    def scoring_body(self, model: str, topk: int) -> dict[str, Any]:
        """Return the JSON to POST for the prompt's scores. vLLM does not stream scores, and draws at least one token."""
        params = {"max_tokens": 1, "temperature": 0, "detokenize": False, "prompt_logprobs": topk}
        return self._body(model, params) | {"stream": False}

    def probe_body(self, model: str, length: int, params: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON to POST for a token after the first ``length`` of the prompt."""
        return self._body(model, params, length) | {"stream": False}

    def _body(self, model: str, params: dict[str, Any], length: int | None = None) -> dict[str, Any]:
        prompt = self.request.prompt[:length].tolist()
        body: dict[str, Any] = {"model": model, "token_ids": prompt, "sampling_params": params}
        if self.request.cache_salt is not None:
            # vLLM refuses an empty salt; weft allows it.
            body["cache_salt"] = f"weft:{self.request.cache_salt}"
        return body


def _rule_params(rules: LogitRules | None) -> dict[str, Any]:
    if rules is None:
        return {}
    params: dict[str, Any] = {
        "frequency_penalty": rules.frequency_penalty,
        "presence_penalty": rules.presence_penalty,
    }
    if rules.biases:
        params["logit_bias"] = {str(token): bias for token, bias in rules.biases}
    if rules.grammar is not None:
        params["structured_outputs"] = _structured_outputs(rules.grammar)
    return params


def _structured_outputs(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": grammar.text}
        case "structural_tag":
            return {"structural_tag": grammar.text}


def check(request: GenerateRequest, settings: VllmReplicaSettings, longest: int) -> None:
    """Raise ``InvalidRequest`` for a request that the server would refuse or silently change.

    ``longest`` is the most tokens of a prompt and what is drawn after it.
    """
    check_request(request, settings.base)
    if len(request.prompt) + request.max_tokens > longest:
        raise InvalidRequest(
            f"prompt and max_tokens: this sampler takes {longest} tokens together; an operator who starts its server with "
            f"--max-model-len {settings.base.context_length + 1} lets a prompt of the whole context be scored"
        )
    limit = settings.max_logprobs
    if likely_asked(request.topk) > limit:
        raise InvalidRequest(f"topk: this sampler reports at most {limit - 1} likeliest tokens")
    if request.scoring is not None and request.scoring.topk > limit:
        raise InvalidRequest(f"scoring: this sampler reports at most {limit} likeliest tokens of the prompt")
