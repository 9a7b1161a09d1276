"""Penalties, ``logit_bias`` and ``response_format`` on a real vLLM server, through pauses, swaps and departures."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.openai_calls import openai_client, through_pauses
from tests.e2e.raw_client import RawClient
from tests.e2e.speaker import MEOW, PROMPT, Speaker, teach, text

SAY = text(PROMPT)
MOO = "moo "
LONG = 240
PENALTIES = {"frequency_penalty": 0.3, "presence_penalty": 1.0}
NO_SPACE = {str(ord(letter)): -100.0 for letter in " \n\r\t"}
"""Keeps a random model from writing spaces between JSON's marks for ever."""
NUMBERS = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 40, "maxItems": 40}},
    "required": ["numbers"],
    "additionalProperties": False,
}
AS_NUMBERS = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}


@pytest.fixture(scope="module")
def cat(vllm_service: Service) -> Iterator[Speaker]:
    """Says meow or moo after "Say: "."""
    client = RawClient(vllm_service.base_url, vllm_service.key)
    yield teach(client, {MEOW: 30, MOO: 30})
    client.close()


@pytest.fixture(scope="module")
def client(vllm_service: Service) -> Iterator[openai.OpenAI]:
    """The first tenant's."""
    with openai_client(vllm_service, vllm_service.key) as made:
        yield made


@pytest.fixture(scope="module")
def stranger(vllm_service: Service) -> Iterator[openai.OpenAI]:
    """The second tenant's."""
    with openai_client(vllm_service, vllm_service.other_key) as made:
        yield made


def said(client: openai.OpenAI, model: str, **asked: Any) -> str:
    """A greedy completion."""
    asked = {"max_tokens": LONG, "temperature": 0, **asked}
    return client.completions.create(model=model, prompt=SAY, **asked).choices[0].text


def streamed(client: openai.OpenAI, model: str, **asked: Any) -> str:
    """A greedy completion, as its stream says it."""
    asked = {"max_tokens": LONG, "temperature": 0, **asked}
    parts = client.completions.create(model=model, prompt=SAY, stream=True, **asked)
    return "".join(part.choices[0].text for part in parts if part.choices)


def counting(model: str) -> dict[str, Any]:
    """A request for an answer in the form of ``NUMBERS``."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Count."}],
        "response_format": AS_NUMBERS,
        "logit_bias": NO_SPACE,
        "max_completion_tokens": LONG,
    }


def numbers(client: openai.OpenAI, model: str, **asked: Any) -> str:
    """An answer in the form of ``NUMBERS``."""
    made = client.chat.completions.create(**counting(model), **asked)
    return made.choices[0].message.content or ""


def streamed_numbers(client: openai.OpenAI, model: str, **asked: Any) -> str:
    """An answer in the form of ``NUMBERS``, as its stream says it."""
    parts = client.chat.completions.create(**counting(model), stream=True, **asked)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def test_biases_and_penalties_decide_what_is_drawn(cat: Speaker, client: openai.OpenAI) -> None:
    plain = said(client, cat.paths[MEOW], max_tokens=20)
    assert plain == MEOW * 4
    assert said(client, cat.paths[MEOW], max_tokens=20, logit_bias={str(ord("x")): 100}) == "x" * 20
    assert "e" not in said(client, cat.paths[MEOW], logit_bias={str(ord("e")): -100})
    drawn = set(said(client, BASE_NAME))
    for name in ("frequency_penalty", "presence_penalty"):
        assert len(set(said(client, BASE_NAME, **{name: 2.0}))) > len(drawn)
        assert set(said(client, cat.paths[MEOW], **{name: -2.0})) <= set(MEOW)


def test_penalties_count_on_through_pauses(
    vllm_service: Service, cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    cat.says(MEOW)
    uncut = said(client, cat.paths[MEOW], **PENALTIES)
    beside = said(stranger, BASE_NAME, **PENALTIES)
    assert uncut != said(client, cat.paths[MEOW])
    assert through_pauses(vllm_service, cat, lambda: said(client, cat.run, **PENALTIES)) == uncut
    assert through_pauses(vllm_service, cat, lambda: streamed(client, cat.run, **PENALTIES)) == uncut
    assert said(stranger, BASE_NAME, **PENALTIES) == beside


def test_a_drawn_stream_with_penalties_says_the_same_after_a_pause(
    vllm_service: Service, cat: Speaker, client: openai.OpenAI
) -> None:
    cat.says(MEOW)
    seeded = {**PENALTIES, "temperature": 0.5, "seed": 11}
    uncut = said(client, cat.paths[MEOW], **seeded)
    assert through_pauses(vllm_service, cat, lambda: streamed(client, cat.run, **seeded)) == uncut


def test_a_stream_that_begins_anew_on_another_version_ends_with_an_error(
    cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    cat.says(MEOW)
    parts = client.completions.create(
        model=cat.run, prompt=SAY, stream=True, max_tokens=LONG, temperature=0, **PENALTIES
    )
    told = ""
    # Both words begin alike: what was told must be of one of them only.
    while len(told) < len(MEOW):
        told += next(parts).choices[0].text
    cat.gate("pause", mode="keep")
    cat.says(MOO)
    cat.gate("resume")
    with pytest.raises(openai.APIError, match="began anew"):
        list(parts)
    assert said(stranger, BASE_NAME, max_tokens=5)


def test_a_form_holds_through_pauses(
    vllm_service: Service, cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    cat.says(MEOW)
    uncut = numbers(client, cat.paths[MEOW], temperature=0)
    assert set(json.loads(uncut)["numbers"]) <= {1, 22, 333}
    assert len(json.loads(uncut)["numbers"]) == 40
    beside = numbers(stranger, BASE_NAME, seed=3)
    assert through_pauses(vllm_service, cat, lambda: numbers(client, cat.run, temperature=0)) == uncut
    drawn = through_pauses(vllm_service, cat, lambda: numbers(client, cat.run))
    assert len(json.loads(drawn)["numbers"]) == 40
    assert numbers(stranger, BASE_NAME, seed=3) == beside


def test_a_streamed_form_says_the_same_through_pauses(
    vllm_service: Service, cat: Speaker, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    cat.says(MEOW)
    uncut = numbers(client, cat.paths[MEOW], temperature=0)
    beside = streamed_numbers(stranger, BASE_NAME, seed=3)
    assert through_pauses(vllm_service, cat, lambda: streamed_numbers(client, cat.run, temperature=0)) == uncut
    assert streamed_numbers(stranger, BASE_NAME, seed=3) == beside


def test_any_json_object_is_one(client: openai.OpenAI) -> None:
    end_soon = {str(ord("}")): 40.0, str(ord('"')): 20.0}
    made = client.chat.completions.create(
        model=BASE_NAME,
        messages=[{"role": "user", "content": "JSON, please."}],
        response_format={"type": "json_object"},
        logit_bias={**NO_SPACE, **end_soon},
        max_completion_tokens=200,
        seed=1,
    )
    assert made.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(made.choices[0].message.content or ""), dict)


def test_a_sample_with_penalties_ends_on_the_version_that_it_began_on(cat: Speaker, client: openai.OpenAI) -> None:
    cat.says(MEOW)
    uncut, newer = (said(client, cat.paths[word], **PENALTIES) for word in (MEOW, MOO))
    assert uncut != newer
    parts = client.completions.create(
        model=cat.run, prompt=SAY, stream=True, max_tokens=LONG, temperature=0, **PENALTIES
    )
    heard = next(iter(parts)).choices[0].text
    cat.says(MOO)
    assert said(client, cat.run, **PENALTIES) == newer
    assert heard + "".join(part.choices[0].text for part in parts if part.choices) == uncut


def test_a_client_that_leaves_ends_its_sample_with_a_form(cat: Speaker, client: openai.OpenAI) -> None:
    parts = client.chat.completions.create(
        model=cat.run,
        messages=[{"role": "user", "content": "Count."}],
        response_format=AS_NUMBERS,
        logit_bias=NO_SPACE,
        stream=True,
    )
    next(iter(parts))
    parts.close()
    cat.until_in_flight(0)
    assert json.loads(numbers(client, cat.run))


def test_what_a_server_has_no_grammar_for_is_refused(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    odd = {"type": "json_schema", "json_schema": {"name": "odd", "schema": {"type": "integer", "multipleOf": 3}}}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model=BASE_NAME, messages=[{"role": "user", "content": "Count."}], response_format=odd
        )
    assert json.loads(numbers(stranger, BASE_NAME))


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"logit_bias": {"1": 1}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_the_torch_sampler_refuses_by_name(service: Service, asked: dict[str, Any]) -> None:
    with (
        openai_client(service, service.key) as client,
        pytest.raises(openai.BadRequestError, match=f"{next(iter(asked))} is offered where vLLM samples"),
    ):
        client.chat.completions.create(model=BASE_NAME, messages=[{"role": "user", "content": "Hi"}], **asked)
