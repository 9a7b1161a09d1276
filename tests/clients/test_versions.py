"""A client reads the answers of newer and of older services: fields may be unknown, and those that may be null missing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from weft_client import admin_models, calls, models
from weft_client.call import Call
from weft_client.errors import BadRequest, OverLimit, WeftClientError
from weft_client.streams import Accepted, Done, StreamReader, Tokens
from weft_client.transport import read

from cli.pages.admin_routes import admin_document
from cli.pages.routes import openapi_document
from contracts.waiting import WaitReason

_TEXTS = {"date-time": "2026-01-01T00:00:00Z", "date": "2026-01-01"}
_DOCUMENTS = {models: openapi_document, admin_models: admin_document}


def records() -> Iterator[Any]:
    for module in _DOCUMENTS:
        for name, record in vars(module).items():
            if isinstance(record, type) and issubclass(record, models.Record) and record.__module__ != "pydantic.main":
                is_own = record.__module__ == admin_models.__name__ if module is admin_models else True
                if is_own and name not in ("Record", "Page"):
                    yield pytest.param(module, record, id=f"{module.__name__}.{name}")


class Service:
    """A service of another version: a newer one has a field and a word more wherever it may, an older one nothing optional."""

    def __init__(self, document: dict[str, Any], *, is_newer: bool) -> None:
        self._schemas, self._is_newer = document["components"]["schemas"], is_newer

    def record(self, name: str) -> dict[str, Any]:
        """Return an answer of that schema."""
        schema = self._schemas[name]
        required = schema.get("required", ())
        made = {
            field: self._value(described)
            for field, described in schema["properties"].items()
            if self._is_newer or (field in required and not _is_nullable(described))
        }
        return made | ({"a_field_more": {"of": ["any", "kind"]}} if self._is_newer else {})

    def _value(self, schema: dict[str, Any]) -> Any:
        if "anyOf" in schema:
            schema = next(one for one in schema["anyOf"] if one.get("type") != "null")
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if "properties" in self._schemas[name]:
                return self.record(name)
            schema = self._schemas[name]
        if "enum" in schema:
            return "a_word_more" if self._is_newer else schema["enum"][0]
        kind = schema.get("type")
        if kind == "array":
            return [self._value(schema["items"])]
        if kind == "object":
            values = schema.get("additionalProperties")
            return {"one": self._value(values)} if isinstance(values, dict) else {}
        # Also an amount of money is text.
        texts = _TEXTS.get(schema.get("format", ""), "1.5")
        return {"string": texts, "integer": 1, "number": 1.5, "boolean": True}.get(kind)


def _is_nullable(schema: dict[str, Any]) -> bool:
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


@pytest.fixture(scope="module")
def documents() -> dict[Any, dict[str, Any]]:
    return {module: made() for module, made in _DOCUMENTS.items()}


@pytest.mark.parametrize(("module", "record"), list(records()))
@pytest.mark.parametrize("is_newer", [True, False])
def test_a_record_is_read_from_the_answer_of_another_version(
    documents: dict[Any, dict[str, Any]], module: Any, record: type[BaseModel], is_newer: bool
) -> None:
    answer = Service(documents[module], is_newer=is_newer).record(record.__name__)
    read = record.model_validate(answer)
    assert set(read.model_dump()) == set(record.model_fields)
    if not is_newer:
        missing = set(record.model_fields) - set(answer)
        assert {getattr(read, field) for field in missing if not isinstance(getattr(read, field), list)} <= {None}


def event(name: str, **data: Any) -> list[str]:
    """Return the lines of an event of a stream."""
    return [f"event: {name}", f"data: {json.dumps(data)}", ""]


def test_a_stream_of_a_newer_service_is_read_without_what_is_not_known() -> None:
    more = {"a_field_more": {"of": ["any", "kind"]}}
    drawn = {"tokens": [5], "logprobs": [-0.5]}
    lines = [
        *event("a_kind_more", **more),
        *event("accepted", request_id="one", **more),
        *event("tokens", sequence=0, start=0, version="v", **drawn, **more),
        ": kept alive",
        "retry: 100",
        *event("a_kind_more", **more),
        *event("done", request_id="one", sequences=[{"stop_reason": "a_word_more", **drawn, **more}], **more),
    ]
    reader = StreamReader()
    found = [one for line in lines for one in reader.events(line)]
    assert [type(one) for one in found] == [Accepted, Tokens, Done]
    assert reader.is_done


@pytest.mark.parametrize(
    ("status", "kind"), [(400, BadRequest), (402, WeftClientError), (429, OverLimit), (451, WeftClientError)]
)
def test_an_error_of_a_newer_service_keeps_its_code_and_says_whether_to_come_again(
    status: int, kind: type[WeftClientError]
) -> None:
    told = {"detail": "x", "code": "a_code_more", "retryable": status == 429, "a_field_more": {}}
    with pytest.raises(kind) as raised:
        read(Call("GET", "/", None), httpx.Response(status, json=told, headers={"Retry-After": "7"}))
    assert (type(raised.value), raised.value.code, raised.value.status) == (kind, "a_code_more", status)
    assert (raised.value.retryable, raised.value.retry_after) == (status == 429, 7.0)


def test_a_call_of_a_newer_service_reads_a_reason_that_it_does_not_know(documents: dict[Any, dict[str, Any]]) -> None:
    """A wait for a reason that is new is told in words, which need no reason to be known."""
    answer = Service(documents[models], is_newer=True).record("WaitingInfo") | {"text": "it waits for the moon"}
    found = read(calls.waiting("run"), httpx.Response(200, json=answer))
    assert isinstance(found, models.WaitingInfo)
    assert found.text == "it waits for the moon"
    assert found.reason not in {reason.value for reason in WaitReason}
