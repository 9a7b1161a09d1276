"""Penalties, biases and forms of OpenAI's requests: checked before anything is built, refused by the name of their field."""

import inspect
import json
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions

from api.openai.chat import ChatRequest
from api.openai.completions import CompletionRequest
from api.openai.sample_request import sample_request
from api.openai.text_form import MOST_NESTING, MOST_SCHEMA_BYTES
from api.wire.openai_requests import GenerationRequest
from api.wire.request_model import parse_json
from contracts.errors import InvalidRequest
from contracts.logit_rules import MOST_BIASES, Grammar, LogitRules
from contracts.operations import SampleRequest
from contracts.vocabulary import BaseVocabulary
from tests.api.wire.support import FACTS, LIMITS, VOCABULARY

ENDS = BaseVocabulary(frozenset({4, 2}), None, end_of_text_ids=frozenset({3}))
ON_VLLM = LIMITS.model_copy(update={"vllm_replicas": 1})
MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "other"}}
TRANSPORT = {"self", "messages", "model", "prompt", "extra_headers", "extra_query", "extra_body", "timeout"}
SAMPLES: dict[str, Any] = {
    "audio": {"voice": "ash"},
    "best_of": 3,
    "function_call": "auto",
    "functions": [{"name": "look"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "store": True,
    "suffix": "x",
    "verbosity": "low",
    "web_search_options": {},
}
"""Fields that weft does not serve, with a value that asks for something."""
WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}


def chat(**fields: Any) -> ChatRequest:
    return parse_json(ChatRequest, json.dumps({"model": FACTS.name, "messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_json(CompletionRequest, json.dumps({"model": FACTS.name, "prompt": "x", **fields}).encode())


def sample(asked: GenerationRequest) -> SampleRequest:
    asked.check_offered()
    return sample_request(asked, [5, 6, 7], FACTS, ENDS, ON_VLLM)


def refused(asked: GenerationRequest) -> str:
    with pytest.raises(InvalidRequest) as found:
        sample(asked)
    return found.value.message


@pytest.mark.parametrize(
    ("made", "create"), [(chat, ChatCompletions.create), (completion, Completions.create)], ids=["chat", "completions"]
)
def test_every_field_of_the_client_is_served_or_refused_by_name(made: Any, create: Any) -> None:
    """A field that the client has and this list has not fails here, when the client's version is raised."""
    served = set(type(made()).model_fields) - set(SAMPLES)
    fields = set(inspect.signature(create).parameters) - TRANSPORT - served
    assert fields <= set(SAMPLES) | WITHOUT_EFFECT
    for name in fields:
        if name in SAMPLES:
            assert refused(made(**{name: SAMPLES[name]})).startswith(f"{name} "), name
        else:
            assert sample(made(**{name: "x"})).logit_rules is None


def test_unknown_fields_are_refused_and_nulls_are_not() -> None:
    assert "guided_json is not offered" in refused(completion(guided_json={}))
    assert "min_p is not offered" in refused(chat(min_p=0.1))
    assert sample(chat(min_p=None, store=False, modalities=["text"])).logit_rules is None


def test_rules_travel_in_the_record() -> None:
    asked = sample(completion(frequency_penalty=1, presence_penalty=-2, logit_bias={"9": 1.5, "3": -100}))
    assert asked.logit_rules == LogitRules(1.0, -2.0, [(3, -100.0), (9, 1.5)])
    assert asked.params.seed is not None, "a sample that may begin anew must say the same again"
    assert sample(completion(frequency_penalty=1, seed=5)).params.seed == 5
    biased = sample(completion(logit_bias={"9": 1}))
    assert (biased.in_one_piece, biased.params.seed) == (False, None)
    assert sample(completion(logit_bias={}, frequency_penalty=0)).logit_rules is None


def test_a_form_ends_with_the_tokenizers_end_too() -> None:
    asked = sample(chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}))
    assert asked.logit_rules is not None
    assert asked.logit_rules.grammar == Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))
    assert asked.params.stop_tokens == [2, 3, 4]
    assert sample(chat(response_format={"type": "text"})).logit_rules is None


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty must be -2 to 2"),
        ({"presence_penalty": -3}, "presence_penalty must be -2 to 2"),
        ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias: "),
        ({"logit_bias": {"-1": 1}}, "logit_bias: "),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: "),
        ({"logit_bias": {"1": 100.5}}, "logit_bias of token 1 must"),
        ({"logit_bias": {str(one): 1 for one in range(MOST_BIASES + 1)}}, f"logit_bias has {MOST_BIASES + 1}"),
        ({"response_format": {"type": "xml"}}, "response_format: type"),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema needs"),
        ({"response_format": {"type": "json_object"}, "logprobs": True}, "logprobs do not come with response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [LOOK]}, "response_format does not come with tools"),
        ({"tools": [LOOK], "tool_choice": "must"}, "tool_choice must be"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice names 'b'"),
        ({"tools": [LOOK, LOOK]}, "tools: two functions"),
        ({"tools": [{"type": "custom", "custom": {"name": "b"}}]}, "tools: only tools of type function"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools: a function's name"),
        ({"tools": [OTHER] * 129}, "tools has 129"),
    ],
)
def test_errors_name_the_field(asked: dict[str, Any], text: str) -> None:
    assert refused(chat(**asked)).startswith(text)


def test_schemas_are_bounded_before_a_server_sees_them() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MOST_NESTING):
        deep = {"items": deep}
    for schema, text in ((deep, "nested over"), ({"enum": ["x" * MOST_SCHEMA_BYTES]}, "bytes; send at most")):
        described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        assert text in refused(chat(response_format=described))
        function = {"type": "function", "function": {"name": "look", "parameters": schema}}
        assert text in refused(chat(tools=[function]))
    with pytest.raises(InvalidRequest, match="number is too large"):
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"maximum": 10**30}}})


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [LOOK], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "look", "strict": True}}]}, "tools with strict"),
    ],
)
def test_weft_itself_refuses_by_name_what_vllm_alone_has(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}.* is offered where vLLM samples the base only"):
        sample_request(chat(**asked), [5, 6, 7], FACTS, ENDS, LIMITS)


def test_a_choice_of_tools_is_a_form() -> None:
    def form(**asked: Any) -> dict[str, Any] | None:
        grammar = chat(tools=[LOOK, OTHER], **asked).grammar
        assert grammar is None or grammar.kind == "structural_tag"
        found: dict[str, Any] | None = None if grammar is None else json.loads(grammar.text)["format"]
        return found

    assert form() is form(tool_choice="auto") is form(tool_choice="none") is None
    required = form(tool_choice="required")
    assert required is not None
    assert [tag["content"]["json_schema"] for tag in required["tags"]] == [SCHEMA, {"type": "object"}]
    assert (required["at_least_one"], required["stop_after_first"]) == (True, False)
    named = form(tool_choice={"type": "function", "function": {"name": "other"}})
    assert named is not None
    assert (len(named["tags"]), named["stop_after_first"]) == (1, True)
    assert chat(tools=[LOOK], parallel_tool_calls=False).most_calls == 1
    assert chat(tools=[LOOK], tool_choice="none").most_calls == chat().most_calls == 0
