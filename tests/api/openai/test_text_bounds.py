"""Text is tokenized where it holds nobody up, and not at all if it cannot fit."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from api.openai import text_form, tools
from api.request_body import OFF_LOOP_BYTES
from api.services import ApiServices
from contracts.vocabulary import BaseVocabulary, ChatMessage
from tests.api.conftest import BASE, Service, Tenant

LONGEST_TOKEN, CONTEXT = 100, 128
GIVE_UP_SECONDS = 30


class HeldTokenizer:
    """A tokenizer that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.texts = 0
        self.is_on_loop = False

    def encode(self, text: str) -> list[int]:
        self.texts += 1
        self.begun.set()
        self.is_on_loop = threading.current_thread() is threading.main_thread()
        # Nobody could let it go there.
        if not self.is_on_loop:
            assert self.let_go.wait(GIVE_UP_SECONDS), "nobody was served while the text was tokenized"
        return [1] * 1000

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        assert not tools
        return self.encode("".join(message.content for message in messages))


@pytest.fixture
def tokenizer(service: Service) -> HeldTokenizer:
    """The tokenizer of the served base."""
    held = HeldTokenizer()
    services: ApiServices = service.services
    vocabulary = BaseVocabulary(frozenset(), str, held.encode, held.chat, longest_token=LONGEST_TOKEN)
    services.vocabularies[BASE] = vocabulary  # type: ignore[index]
    return held


def body(path: str, text: str) -> dict[str, object]:
    said = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"model": BASE, "max_tokens": 1, **said}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_others_are_served_while_a_text_is_tokenized(
    service: Service, cats: Tenant, dogs: Tenant, tokenizer: HeldTokenizer, path: str
) -> None:
    session = await dogs.session()
    text = "x" * (LONGEST_TOKEN * CONTEXT - 1)
    asked = asyncio.create_task(cats.http.post(service.url + path, json=body(path, text)))
    async with asyncio.timeout(60):
        assert await asyncio.to_thread(tokenizer.begun.wait, GIVE_UP_SECONDS)
        assert not tokenizer.is_on_loop
        assert (await dogs.http.post("/session_heartbeat", json={"session_id": session})).status_code == 200
        tokenizer.let_go.set()
        answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    service: Service, cats: Tenant, tokenizer: HeldTokenizer, path: str
) -> None:
    tokenizer.let_go.set()
    text = "x" * (LONGEST_TOKEN * CONTEXT + 1)
    answer = await cats.http.post(service.url + path, json=body(path, text))
    assert answer.status_code == 400
    assert f"{CONTEXT} tokens" in answer.json()["error"]["message"]
    assert tokenizer.texts == 0


LARGE_SCHEMA = {"type": "object", "description": "x" * OFF_LOOP_BYTES}
FORMS: dict[str, dict[str, object]] = {
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": LARGE_SCHEMA}},
    },
    "tools": {"tools": [{"type": "function", "function": {"name": "look", "parameters": LARGE_SCHEMA}}]},
}


@pytest.mark.parametrize("field", list(FORMS))
async def test_a_large_form_is_checked_on_a_thread(
    service: Service,
    cats: Tenant,
    dogs: Tenant,
    tokenizer: HeldTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:
    tokenizer.let_go.set()
    session, on_loop, check = await dogs.session(), list[bool](), text_form.check_schema

    def noted(schema: Any, name: str) -> None:
        on_loop.append(threading.current_thread() is threading.main_thread())
        check(schema, name)

    for module in (text_form, tools):
        monkeypatch.setattr(module, "check_schema", noted)
    asked = body("/v1/chat/completions", "x") | FORMS[field]
    answers = await asyncio.gather(
        cats.http.post(service.url + "/v1/chat/completions", json=asked),
        dogs.http.post("/session_heartbeat", json={"session_id": session}),
    )
    assert [answer.status_code for answer in answers] == [400, 200]
    assert set(on_loop) == {False}
