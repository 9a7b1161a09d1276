"""Requests of the real ``openai`` client that last, beside what is done to their samples meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import openai

from tests.e2e.conftest import Service
from tests.e2e.speaker import Speaker

T = TypeVar("T")


def openai_client(service: Service, key: str) -> openai.OpenAI:
    """A tenant's client."""
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key=key, max_retries=0, timeout=120)


def through_pauses(speaker: Speaker, call: Callable[[], T], *, pauses: int = 2) -> T:
    """Return what ``call`` returns, a request of the speaker's run whose sample is paused so many times meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        called: Future[T] = threads.submit(call)
        for _ in range(pauses):
            speaker.until_in_flight(1)
            assert speaker.gate("pause", mode="keep")["state"] == "paused"
            assert not called.done(), "the sample ended before it could be paused"
            speaker.gate("resume")
        return called.result()
