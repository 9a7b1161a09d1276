"""Requests of the real ``openai`` client that last, beside what is done to their samples meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import openai

from tests.e2e.conftest import Service
from tests.e2e.running_samples import drawn_by_vllm, until
from tests.e2e.speaker import TRIES, Speaker

T = TypeVar("T")
BEFORE_A_PAUSE = 32
"""Tokens that are drawn before a pause: more than one message of the replica brings."""


def openai_client(service: Service, key: str) -> openai.OpenAI:
    """A tenant's client."""
    return openai.OpenAI(base_url=f"{service.base_url}/v1", api_key=key, max_retries=0, timeout=120)


def through_pauses(service: Service, speaker: Speaker, call: Callable[[], T], *, pauses: int = 2) -> T:
    """Return what ``call`` returns, a request of the speaker's run whose sample is paused so many times meanwhile.

    Each time vLLM has drawn some tokens of it: nothing is lost of a sample that has none.
    """
    with ThreadPoolExecutor(1) as threads:
        for _ in range(TRIES):
            called: Future[T] = threads.submit(call)
            for _ in range(pauses):
                _until_drawn(service, BEFORE_A_PAUSE)
                assert speaker.gate("pause", mode="keep")["state"] == "paused"
                has_ended = called.done()
                speaker.gate("resume")
                # On a busy machine it may end before it is paused: then it is asked for again.
                if has_ended:
                    break
            else:
                return called.result()
    raise AssertionError("every time the sample had ended before")


def _until_drawn(service: Service, tokens: int) -> None:
    enough = drawn_by_vllm(service) + tokens
    until(lambda: drawn_by_vllm(service) >= enough, f"{tokens} tokens more are drawn")
