"""OpenAI's requests become the same record as the same request of the Tinker API, and errors name OpenAI's fields."""

import json
from typing import Any

import pytest

from api.openai.chat import ChatRequest
from api.openai.completions import CompletionRequest
from api.openai.sample_request import sample_request
from api.wire import sampling_codec
from api.wire.openai_requests import GenerationRequest
from api.wire.request_model import parse_json
from api.wire.tinker_requests import AsampleRequest
from contracts.errors import InvalidRequest
from contracts.operations import SampleRequest
from contracts.vocabulary import BaseVocabulary
from tests.api.wire.support import CONTEXT, FACTS, LIMITS, MAX_SAMPLES, MAX_TOPK, VOCABULARY
from tests.payloads import digest

PROMPT = [5, 6, 7]
ENDS = BaseVocabulary(frozenset({4, 2}), None)


def completion(**fields: Any) -> GenerationRequest:
    return parse_json(CompletionRequest, json.dumps({"model": FACTS.name, "prompt": PROMPT, **fields}).encode())


def chat(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "hello"}]
    return parse_json(ChatRequest, json.dumps({"model": FACTS.name, "messages": messages, **fields}).encode())


def sample(asked: GenerationRequest, prompt: list[int] = PROMPT) -> SampleRequest:
    return sample_request(asked, prompt, FACTS, ENDS, LIMITS)


def tinker_sample(params: dict[str, Any], **fields: Any) -> SampleRequest:
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": params, **fields}
    return sampling_codec.sample_request(parse_json(AsampleRequest, json.dumps(body).encode()), FACTS, LIMITS)


@pytest.mark.parametrize(
    ("asked", "params", "fields"),
    [
        (completion(), {"max_tokens": 16}, {}),
        (completion(max_tokens=None, top_k=0), {"max_tokens": 16}, {}),
        (
            completion(temperature=0, top_p=0.5, top_k=3, seed=9, n=2, logprobs=1),
            {"max_tokens": 16, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 9},
            {"num_samples": 2, "topk_sample_logprobs": 1},
        ),
        (chat(max_tokens=3), {"max_tokens": 3}, {}),
        (
            chat(max_tokens=3, max_completion_tokens=4, logprobs=True, top_logprobs=2),
            {"max_tokens": 4},
            {"topk_sample_logprobs": 2},
        ),
    ],
)
def test_both_wires_make_one_record(asked: GenerationRequest, params: dict[str, Any], fields: dict[str, Any]) -> None:
    assert digest(sample(asked)) == digest(tinker_sample(params, **fields))


@pytest.mark.parametrize("most", [0, 3, 100])
def test_alternatives_have_the_bound_that_the_operator_sets(most: int) -> None:
    limits = LIMITS.model_copy(update={"max_topk_logprobs": most})

    def made(asked: GenerationRequest) -> SampleRequest:
        return sample_request(asked, PROMPT, FACTS, ENDS, limits)

    assert made(completion(logprobs=most)).topk_sample_logprobs == most
    assert made(chat(logprobs=True, top_logprobs=most)).topk_sample_logprobs == most
    for beyond in (most + 1, -1):
        with pytest.raises(InvalidRequest, match=f"^logprobs must be 0 to {most}; got {beyond}$"):
            made(completion(logprobs=beyond))
        with pytest.raises(InvalidRequest, match=f"^top_logprobs must be 0 to {most}; got {beyond}$"):
            made(chat(logprobs=True, top_logprobs=beyond))


def test_stop_strings_come_beside_the_models_own_end() -> None:
    params = sample(completion(stop="x")).params
    assert (params.stop_strings, params.stop_tokens) == (["x"], [2, 4])
    params = sample(completion(stop=[])).params
    assert (params.stop_strings, params.stop_tokens) == (None, None)


@pytest.mark.parametrize(
    ("asked", "prompt", "text"),
    [
        (completion(temperature=-1), PROMPT, "temperature must"),
        (completion(temperature=0.001), PROMPT, "temperature must be 0 (greedy), or a number from 0.01 to 2"),
        (completion(top_p=0), PROMPT, "top_p must"),
        (completion(seed=2**64), PROMPT, "seed must"),
        (completion(stop=[""]), PROMPT, "stop has"),
        (completion(n=0), PROMPT, f"n must be 1 to {MAX_SAMPLES}"),
        (completion(max_tokens=0), PROMPT, "max_tokens must"),
        (completion(max_tokens=CONTEXT), PROMPT, f"prompt (3 tokens) and max_tokens ({CONTEXT})"),
        (completion(logprobs=MAX_TOPK + 1), PROMPT, f"logprobs must be 0 to {MAX_TOPK}"),
        (completion(), [], "prompt is empty"),
        (completion(), [VOCABULARY], "prompt has token ids"),
        (completion(), [2**70], "prompt: a token id"),
        (chat(), [], "messages is empty"),
        (chat(max_tokens=CONTEXT), PROMPT, f"messages (3 tokens) and max_tokens ({CONTEXT})"),
        (chat(max_completion_tokens=CONTEXT), PROMPT, f"messages (3 tokens) and max_completion_tokens ({CONTEXT})"),
        (chat(max_completion_tokens=0), PROMPT, "max_completion_tokens must"),
        (chat(logprobs=True, top_logprobs=MAX_TOPK + 1), PROMPT, f"top_logprobs must be 0 to {MAX_TOPK}"),
    ],
)
def test_errors_name_the_field_as_openai_does(asked: GenerationRequest, prompt: list[int], text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sample(asked, prompt)
    assert refused.value.message.startswith(text)
    assert "sampling_params" not in refused.value.message
