"""A client reads the answers of newer and of older services: fields may be unknown, and those that may be null missing."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from weft_client import admin_models, calls, models
from weft_client.call import Call
from weft_client.errors import BadRequest, BudgetSpent, OverLimit, WeftClientError
from weft_client.streams import Accepted, Done, StreamReader, Tokens
from weft_client.transport import read

from cli.pages.admin_routes import admin_document
from cli.pages.routes import openapi_document
from contracts.waiting import WaitReason
from tests.other_versions import Service, Version

_DOCUMENTS = {models: openapi_document, admin_models: admin_document}


def records() -> Iterator[Any]:
    for module in _DOCUMENTS:
        for name, record in vars(module).items():
            if isinstance(record, type) and issubclass(record, models.Record) and record.__module__ != "pydantic.main":
                is_own = record.__module__ == admin_models.__name__ if module is admin_models else True
                if is_own and name not in ("Record", "Page"):
                    yield pytest.param(module, record, id=f"{module.__name__}.{name}")


@pytest.fixture(scope="module")
def documents() -> dict[Any, dict[str, Any]]:
    return {module: made() for module, made in _DOCUMENTS.items()}


@pytest.mark.parametrize(("module", "record"), list(records()))
@pytest.mark.parametrize("version", [Version.NEWER, Version.OLDER])
def test_a_record_is_read_from_the_answer_of_another_version(
    documents: dict[Any, dict[str, Any]], module: Any, record: type[BaseModel], version: Version
) -> None:
    answer = Service(documents[module], version).record(record.__name__)
    read = record.model_validate(answer)
    assert set(read.model_dump()) == set(record.model_fields)
    if version is Version.OLDER:
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


def test_a_stream_of_an_older_service_is_read_without_what_it_does_not_send() -> None:
    reader = StreamReader()
    lines = event("tokens", sequence=0, start=0, tokens=[5], logprobs=[-0.5])
    (read_event,) = (one for line in lines for one in reader.events(line))
    assert isinstance(read_event, Tokens)
    assert (read_event.version, read_event.tokens) == (None, [5])
    with pytest.raises(WeftClientError) as failed:
        list(reader.events("event: error")) + list(reader.events('data: {"error":"x","code":null}'))
    assert (failed.value.detail, failed.value.code, failed.value.retryable) == ("x", "failed", False)


def drawn(sequence: int, start: int, version: str | None, *tokens: int) -> list[str]:
    """Return the lines of an event with tokens."""
    return event(
        "tokens",
        sequence=sequence,
        start=start,
        version=version,
        tokens=tokens,
        logprobs=[-token / 10 for token in tokens],
    )


def handed_on(reader: StreamReader, *sent: list[str]) -> list[tuple[int, int, list[int]]]:
    """Return sequence, start and tokens of the parts that the reader hands on."""
    found = [one for lines in sent for line in lines for one in reader.events(line)]
    parts = [part for part in found if isinstance(part, Tokens)]
    assert all(part.logprobs == [-token / 10 for token in part.tokens] for part in parts)
    return [(part.sequence, part.start, part.tokens) for part in parts]


def test_tokens_of_a_sample_that_is_drawn_again_replace_the_earlier_ones() -> None:
    reader = StreamReader()
    assert handed_on(reader, drawn(0, 0, "v1", 1, 2, 3), drawn(1, 0, "v1", 4, 5)) == [(0, 0, [1, 2, 3]), (1, 0, [4, 5])]
    # The first sequence is drawn again, the second one only told again.
    sent = [drawn(0, 0, "v2", 7, 8), drawn(1, 0, "v1", 4, 5, 6), drawn(0, 2, "v2", 9, 10)]
    assert handed_on(reader, *sent) == [(0, 0, [7, 8]), (1, 2, [6]), (0, 2, [9, 10])]


def test_a_token_that_another_version_draws_again_replaces_its_like() -> None:
    """The log-probability is another."""
    reader = StreamReader()
    handed_on(reader, drawn(0, 0, "v1", 1, 2, 3))
    assert handed_on(reader, drawn(0, 0, "v2", 1, 2)) == [(0, 0, [1, 2])]
    assert handed_on(reader, drawn(0, 2, "v2", 4)) == [(0, 2, [4])]


def test_tokens_that_are_drawn_again_alike_are_handed_on_once() -> None:
    reader = StreamReader()
    handed_on(reader, drawn(0, 0, "v", 1, 2, 3))
    assert handed_on(reader, drawn(0, 0, "v", 1), drawn(0, 1, "v", 2)) == []
    assert handed_on(reader, drawn(0, 2, "v", 9, 10), drawn(0, 4, "v", 11)) == [(0, 2, [9, 10]), (0, 4, [11])]


def test_tokens_behind_a_gap_are_handed_on() -> None:
    reader = StreamReader()
    handed_on(reader, drawn(0, 0, "v", 1))
    assert handed_on(reader, drawn(0, 3, "v", 4), drawn(0, 3, "v", 4, 5)) == [(0, 3, [4]), (0, 4, [5])]


def test_data_without_a_name_are_none_of_the_event_before() -> None:
    reader = StreamReader()
    drawn = event("tokens", sequence=0, start=0, tokens=[5], logprobs=[-0.5])
    lines = [*drawn, 'data: {"a": "message"}', ""]
    assert [type(one) for line in lines for one in reader.events(line)] == [Tokens]


@pytest.mark.parametrize("name", ["accepted", "tokens", "done", "error"])
@pytest.mark.parametrize("data", ["no JSON", "[]", '{"sequences": 5}'])
def test_a_bad_event_of_a_stream_is_an_error_of_the_client(name: str, data: str) -> None:
    reader = StreamReader()
    assert list(reader.events(f"event: {name}")) == []
    with pytest.raises(WeftClientError) as failed:
        list(reader.events(f"data: {data}"))
    is_failure = name == "error" and data.startswith("{")
    assert (failed.value.code, failed.value.status) == ("failed" if is_failure else "bad_answer", 200)
    assert not failed.value.retryable


@pytest.mark.parametrize(
    ("status", "kind"), [(400, BadRequest), (402, BudgetSpent), (429, OverLimit), (451, WeftClientError)]
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
    answer = Service(documents[models], Version.NEWER).record("WaitingInfo") | {"text": "it waits for the moon"}
    found = read(calls.waiting("run"), httpx.Response(200, json=answer))
    assert isinstance(found, models.WaitingInfo)
    assert found.text == "it waits for the moon"
    assert found.reason not in {reason.value for reason in WaitReason}
