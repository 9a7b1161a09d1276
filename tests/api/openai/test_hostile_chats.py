"""A chat that its base model's template cannot write is refused in OpenAI's form, and costs the others nothing."""

import asyncio
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from api.openai.chat import ChatRequest
from api.openai.text_form import MOST_NESTING
from api.request_body import OFF_LOOP_BYTES
from contracts.vocabulary import BaseVocabulary
from engine.sampling.vocabulary import read_vocabulary
from tests.api.conftest import BASE, Service, Tenant

TEMPLATE = """{% macro shown(schema) %}{% for name in schema.properties or [] -%}
{{ name + " " + schema.properties[name].type + ("!" if name in (schema.required or []) else "") }}{% endfor -%}
{{ " " + (schema.type or "any") }}{% endmacro -%}
{% for tool in tools or [] %}{{ tool.function.name + shown(tool.function.parameters) }}<tool_call>{% endfor -%}
{% for message in messages %}{% if message.role == "jester" %}{{ raise_exception("no " ~ message.content) }}{% endif -%}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"""
MISFITS: dict[str, dict[str, Any]] = {
    "type": {"type": 7},
    "properties": {"properties": [1]},
    "required": {"properties": {"at": {"type": "string"}}, "required": 5},
}


@pytest.fixture(scope="module")
def vocabulary(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> BaseVocabulary:
    """The tiny base's, with a template as other models have them."""
    folder = tmp_path_factory.mktemp("base") / "strict"
    shutil.copytree(tiny_model_dir, folder)
    config = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    # No text is too long for the context.
    return replace(read_vocabulary(folder), longest_token=1000)


@pytest.fixture(autouse=True)
def served(service: Service, vocabulary: BaseVocabulary) -> None:
    service.services.vocabularies[BASE] = vocabulary  # type: ignore[index]


def called_with(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "so?"}]}


def told_of(parameters: dict[str, Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    return {"messages": [{"role": "user", "content": "so?"}], "tools": [tool]}


def nested(depth: int) -> str:
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


async def refused(cats: Tenant, dogs: Tenant, asked: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Send the chat beside a neighbour's request, and return the error's message."""
    session = await dogs.session()
    body = orjson.dumps({"model": BASE, "max_tokens": 1, **asked})
    assert len(body) < OFF_LOOP_BYTES, "it is rendered on the loop"
    with caplog.at_level(logging.ERROR):
        answer, beside = await asyncio.gather(
            cats.http.post(f"{cats.service.url}/v1/chat/completions", content=body),
            dogs.http.post("/session_heartbeat", json={"session_id": session}),
        )
    assert beside.status_code == 200
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert not caplog.records, "nothing unforeseen"
    return str(error["message"])


@pytest.mark.parametrize("depth", [MOST_NESTING + 1, 300, 1023])
async def test_arguments_nested_too_deep_are_refused_before_they_are_rendered(
    cats: Tenant, dogs: Tenant, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    assert f"over {MOST_NESTING} deep" in await refused(cats, dogs, called_with(nested(depth)), caplog)


@pytest.mark.parametrize("field", list(MISFITS))
async def test_a_schema_of_types_that_the_template_does_not_know_is_refused(
    cats: Tenant, dogs: Tenant, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    assert "chat template" in await refused(cats, dogs, told_of(MISFITS[field]), caplog)


async def test_what_a_template_tells_of_what_was_sent_is_cut(
    cats: Tenant, dogs: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"messages": [{"role": "jester", "content": "x" * 4000}]}
    message = await refused(cats, dogs, asked, caplog)
    assert "no xxx" in message
    assert len(message) < 400


def test_arguments_as_deep_as_allowed_and_common_schemas_fit(vocabulary: BaseVocabulary) -> None:
    assert vocabulary.chat is not None
    for asked in (called_with(nested(MOST_NESTING)), told_of({"type": "object", "properties": {"a": {"type": "b"}}})):
        body = ChatRequest.model_validate({"model": BASE, **asked})
        assert vocabulary.chat([message.turn() for message in body.messages], body.tool_use.described)
