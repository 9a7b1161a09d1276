"""NUL in the bodies of OpenAI requests: taken in texts that become tokens, which models draw too, and refused elsewhere."""

from typing import Any

import orjson
import pytest

from api.openai.chat import ChatRequest
from api.openai.completions import CompletionRequest
from api.wire.json_counts import DATA
from api.wire.request_model import RequestModel, parse_json
from contracts.errors import InvalidRequest
from contracts.vocabulary import BaseVocabulary
from tests.api.conftest import BASE, Service, Tenant
from tests.api.openai.conftest import answered

NUL = "a\0b"
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": "\0"}'}}
SCHEMA = {"type": "object", "description": NUL}


def chat(**fields: Any) -> tuple[type[RequestModel], dict[str, Any]]:
    return ChatRequest, {"model": "a", "messages": [{"role": "user", "content": "a"}], **fields}


def completion(**fields: Any) -> tuple[type[RequestModel], dict[str, Any]]:
    return CompletionRequest, {"model": "a", "prompt": "a", **fields}


TAKEN = {
    "message": chat(messages=[{"role": "assistant", "content": NUL}]),
    "part": chat(messages=[{"role": "user", "content": [{"type": "text", "text": NUL}]}]),
    "call": chat(messages=[{"role": "assistant", "tool_calls": [CALL]}]),
    "stop": chat(stop=NUL),
    "stops": completion(stop=["a", NUL]),
    "prompt": completion(prompt=NUL),
    "prompts": completion(prompt=["a", NUL]),
}
REFUSED = {
    "model": completion(model=NUL),
    "trajectory": chat(prompt_cache_key=NUL),
    "metadata": chat(metadata={"a": NUL}),
    "name of metadata": chat(metadata={NUL: "a"}),
    "schema": chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
    "tool": chat(tools=[{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]),
    "deep": chat(metadata={"a": [[[[{"a": NUL}]]]]}),
    "beside a prompt": completion(prompt=NUL, user=NUL),
}


@pytest.mark.parametrize("name", list(TAKEN))
def test_a_text_that_becomes_tokens_may_have_nul(name: str) -> None:
    model, body = TAKEN[name]
    parse_json(model, orjson.dumps(body), DATA)


@pytest.mark.parametrize("name", list(REFUSED))
def test_nul_in_any_other_field_is_refused(name: str) -> None:
    model, body = REFUSED[name]
    with pytest.raises(InvalidRequest):
        parse_json(model, orjson.dumps(body), DATA)


async def test_an_answer_with_nul_can_be_sent_back(service: Service, cats: Tenant) -> None:
    """The base draws bytes; the stop string is kept with the sample."""
    service.services.vocabularies[BASE] = BaseVocabulary(  # type: ignore[index]
        frozenset(),
        lambda tokens: bytes(tokens).decode(),
        encode=lambda text: list(text.encode()),
        chat=lambda turns, _tools: list("".join(turn.content for turn in turns).encode()),
    )
    turns = [{"role": "user", "content": "hello"}]
    body = {"model": BASE, "messages": turns, "max_tokens": 3, "stop": "\0\0"}
    first = await answered(cats, body, [104, 0, 105], path="/v1/chat/completions")
    said = first.json()["choices"][0]["message"]
    assert said["content"] == "h\0i"
    body["messages"] = [*turns, said, *turns]
    second = await answered(cats, body, [33], path="/v1/chat/completions")
    assert second.status_code == 200, second.text
    assert second.json()["choices"][0]["message"]["content"] == "!"
