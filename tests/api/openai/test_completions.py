"""``/v1/completions`` over HTTP, with the test in place of the sampler."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import func, select

from contracts.vocabulary import BaseVocabulary
from ledger.token_feed import TokensMade
from store.tables import Operation
from tests.api.conftest import BASE, Service, Tenant
from tests.api.openai.conftest import answered


@pytest.fixture
def letters(service: Service) -> None:
    """Have the base turn a token into as many letters as its number."""

    def text(tokens: Sequence[int]) -> str:
        return "".join(chr(96 + token) * token for token in tokens)

    service.services.vocabularies[BASE] = BaseVocabulary(  # type: ignore[index]
        frozenset(), text, encode=lambda text: [ord(one) - 96 for one in text]
    )


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": BASE, "prompt": [1, 2], "max_tokens": 3, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_base_without_a_tokenizer_is_refused_before_it_samples(
    service: Service, cats: Tenant, stream: bool
) -> None:
    service.services.vocabularies[BASE] = BaseVocabulary(frozenset(), None)  # type: ignore[index]
    answer = await cats.http.post(f"{service.url}/v1/completions", json=asked(stream=stream), timeout=5)
    assert answer.status_code == 400
    assert "no tokenizer" in answer.json()["error"]["message"]
    async with service.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(Operation)) == 0


async def test_a_streams_text_offsets_go_on_from_chunk_to_chunk(letters: None, cats: Tenant) -> None:
    """Each sequence has its own. The last tokens come with the result alone."""
    parts = [
        TokensMade(0, 0, None, [3, 1], [-1.0, -1.0]),
        TokensMade(1, 0, None, [5], [-1.0]),
        TokensMade(0, 2, None, [2], [-1.0]),
        TokensMade(1, 1, None, [1], [-1.0]),
    ]
    body = asked(stream=True, logprobs=0, n=2, max_tokens=4)
    answer = await answered(cats, body, [3, 1, 2, 4], [5, 1, 2, 2], parts=parts)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for choice in choices:
        if choice["logprobs"] is not None:
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == {0: [0, 3, 4, 6], 1: [0, 5, 6, 8]}
    assert len([one for one in choices if one["logprobs"] is not None]) > 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_idempotency_key_that_came_with_another_body_is_named(
    letters: None, cats: Tenant, dogs: Tenant, stream: bool
) -> None:
    """A repeat finds the first answer, and another tenant's key of the same text is another key."""
    headers = {"Idempotency-Key": "twice"}
    first = await answered(cats, asked(), [1, 2, 3], **headers)
    again = await answered(cats, asked(), **headers)
    assert first.json()["choices"] == again.json()["choices"]
    refused = await answered(cats, asked(max_tokens=2, stream=stream), **headers)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "sequence_conflict")
    assert "Idempotency-Key" in error["message"]
    assert not any(one.isdigit() for one in error["message"])
    assert (await answered(dogs, asked(max_tokens=2), [4, 5], **headers)).status_code == 200


async def test_a_prompt_that_is_only_echoed_has_no_completion_tokens(letters: None, cats: Tenant) -> None:
    """One token is drawn for each choice, here the end of the text."""
    body = asked(prompt="abc", echo=True, max_tokens=0, n=2, logprobs=0)
    answer = (await answered(cats, body, [1], [2], stop_reason="stop")).json()
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [("abc", "length")] * 2
