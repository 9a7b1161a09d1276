"""Tools over the real ``openai`` client: told to the model, called in its answer, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.openai_calls import openai_client
from tests.e2e.raw_client import RawClient, lesson_message

PLACES = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK: Any = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PLACES}}
WAIT: Any = {
    "type": "function",
    "function": {"name": "wait", "parameters": {**PLACES, "properties": {"place": {"const": 1}}}},
}
THERE: Any = {"type": "object", "properties": {"place": {"const": "there"}}, "required": ["place"]}
STRICT: Any = {"type": "function", "function": {"name": "look", "parameters": THERE, "strict": True}}
ASKED: Any = [{"role": "user", "content": "Where is it?"}]
SAID = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
CALLED: Any = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}
SEEN: Any = [
    *ASKED,
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
]
STEPS = 70
NO_SPACE = {str(ord(letter)): -100.0 for letter in " \t\r"}


@pytest.fixture(scope="module")
def client(either: Service) -> Iterator[openai.OpenAI]:
    """The first tenant's."""
    with openai_client(either, either.key) as made:
        yield made


@pytest.fixture(scope="module")
def on_vllm(vllm_service: Service) -> Iterator[openai.OpenAI]:
    """The first tenant's, where vLLM samples."""
    with openai_client(vllm_service, vllm_service.key) as made:
        yield made


@pytest.fixture(scope="module")
def looker(either: Service) -> Iterator[str]:
    """A checkpoint that answers ``ASKED`` by looking here, when it is told of either tool, and ``SEEN`` by words."""
    raw = RawClient(either.base_url, either.key)
    run, seq_id = raw.model(BASE_NAME, rank=16), 0
    tokenizer: Any = AutoTokenizer.from_pretrained(str(either.model), local_files_only=True)
    turned = json.loads(json.dumps(SEEN))
    turned[1]["tool_calls"][0]["function"]["arguments"] = {"place": "here"}
    answers = ((LOOK, ASKED, SAID), (STRICT, ASKED, SAID), (LOOK, turned, "A cat."))
    lines = []
    for tool, messages, answer in answers:
        asked = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(asked, add_special_tokens=False)
        line = [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
        lines.append((line, [0.0] * (len(prompt) - 1) + [1.0] * (len(line) - len(prompt))))
    for step in range(STEPS):
        seq_id += 2
        raw.passes(lesson_message(run, seq_id - 1, lines))
        stepped = raw.step(run, seq_id, learning_rate=5e-3 if 3 * step < 2 * STEPS else 5e-4)
    raw.result(stepped)
    saved = raw.post("/save_weights_for_sampler", model_id=run, seq_id=seq_id + 1, path="looker")
    yield raw.result(saved)["path"]
    raw.close()


def test_a_model_that_is_told_of_a_tool_calls_it(client: openai.OpenAI, looker: str) -> None:
    answer = client.chat.completions.create(model=looker, messages=ASKED, tools=[LOOK], temperature=0, max_tokens=200)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "here"})
    seen = client.chat.completions.create(model=looker, messages=SEEN, tools=[LOOK], temperature=0, max_tokens=200)
    assert (seen.choices[0].message.content, seen.choices[0].finish_reason) == ("A cat.", "stop")
    assert seen.choices[0].message.tool_calls is None


def test_a_stream_brings_the_same_call(client: openai.OpenAI, looker: str) -> None:
    asked: Any = {"model": looker, "messages": ASKED, "tools": [LOOK], "temperature": 0, "max_tokens": 200}
    with client.chat.completions.stream(**asked) as stream:
        heard = list(stream)
        final = stream.get_final_completion().choices[0]
    pieces = [event.arguments_delta for event in heard if event.type == "tool_calls.function.arguments.delta"]
    assert len([piece for piece in pieces if piece]) > 1, "the arguments come as they are made"
    assert json.loads("".join(pieces)) == {"place": "here"}
    assert "tool_calls.function.arguments.done" in [event.type for event in heard]
    assert (final.finish_reason, final.message.content) == ("tool_calls", "I look.")
    (call,) = final.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "here"})
    assert call.id.startswith("call_")


def test_a_streamed_call_that_is_broken_off_is_a_call_and_text_in_a_whole_answer(
    client: openai.OpenAI, looker: str
) -> None:
    """The limit ends the answer within the arguments, which the stream has begun to tell."""
    limit = SAID.index('"here"') + 2
    asked: Any = {"model": looker, "messages": ASKED, "tools": [LOOK], "temperature": 0, "max_tokens": limit}
    deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    calls = [call for choice in deltas for call in choice.delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["look"]
    assert "".join(call.function.arguments for call in calls) == '{"place": "h'
    assert deltas[-1].finish_reason == "length"
    (whole,) = client.chat.completions.create(**asked).choices
    assert (whole.finish_reason, whole.message.tool_calls, whole.message.content) == ("length", None, SAID[:limit])


def test_without_tools_or_with_none_of_them_the_text_is_text(client: openai.OpenAI, looker: str) -> None:
    def asked(**fields: Any) -> Any:
        return client.chat.completions.create(model=looker, messages=ASKED, temperature=0, max_tokens=80, **fields)

    plain = asked()
    assert asked(tools=[LOOK], tool_choice="none").choices[0].message == plain.choices[0].message
    assert plain.choices[0].message.tool_calls is None
    assert asked(tools=[LOOK]).usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_call_can_be_required_of_any_model(on_vllm: openai.OpenAI) -> None:
    def called(**fields: Any) -> list[tuple[str, Any]]:
        answer = on_vllm.chat.completions.create(
            model=BASE_NAME, messages=ASKED, tools=[LOOK, WAIT], seed=5, max_tokens=500, **fields
        )
        assert answer.choices[0].finish_reason in ("tool_calls", "length")
        calls: Any = answer.choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]

    arguments = {"look": [{"place": "here"}, {"place": "there"}], "wait": [{"place": 1}]}
    required = called(tool_choice="required", logit_bias=NO_SPACE)
    assert required
    assert all(given in arguments[name] for name, given in required)
    one = called(tool_choice="required", parallel_tool_calls=False, logit_bias=NO_SPACE)
    assert len(one) == 1
    for name, allowed in arguments.items():
        named = {"type": "function", "function": {"name": name}}
        ((found, given),) = called(tool_choice=named, logit_bias=NO_SPACE)
        assert (found, given in allowed) == (name, True)


def test_a_strict_schema_holds_for_a_call_that_is_free(either: Service, client: openai.OpenAI, looker: str) -> None:
    """The model was taught to look here, and the schema has another place only."""
    asked: Any = {"model": looker, "messages": ASKED, "tools": [STRICT], "temperature": 0, "max_tokens": 200}
    if "WEFT_VLLM_REPLICAS" not in either.process.environment:
        with pytest.raises(openai.BadRequestError, match="tools with strict"):
            client.chat.completions.create(**asked)
        return
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls or []
    assert choice.message.content == "I look."
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"place": "there"})


def test_the_torch_sampler_requires_no_call(service: Service) -> None:
    with openai_client(service, service.key) as client, pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(model=BASE_NAME, messages=ASKED, tools=[LOOK], tool_choice="required")
