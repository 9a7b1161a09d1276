"""A pause keeps what a real vLLM server has cached of prompts, and clears it when it is asked to, of that adapter alone."""

from collections.abc import Iterator

import pytest

from testing.operator_command import weft
from tests.e2e.conftest import BASE_NAME, Service
from tests.e2e.raw_client import RawClient

LENGTH = 600
"""Tokens of a prompt: several blocks of vLLM's prefix cache."""


class Reader:
    """A tenant's live sampler, asked for one token after a prompt of its own."""

    def __init__(self, service: Service, key: str, token: int) -> None:
        self.raw = RawClient(service.base_url, key)
        session = self.raw.session()
        self.run = self.raw.model(BASE_NAME, session)
        saved = self.raw.post(
            "/save_weights_for_sampler", model_id=self.run, seq_id=1, sampling_session_seq_id=0, kind="inflight"
        )
        self.sampler = self.raw.result(saved)["sampling_session_id"]
        self.prompt = [token] * LENGTH
        self.asked = 0

    def hits(self) -> int:
        """Tokens of the prompt that were cached before this sample."""
        self.asked += 1
        sent = self.raw.post(
            "/asample",
            sampling_session_id=self.sampler,
            seq_id=self.asked,
            num_samples=1,
            prompt={"chunks": [{"tokens": self.prompt}]},
            sampling_params={"max_tokens": 1},
        )
        result = self.raw.result(sent)
        assert "prompt_cache_hit_tokens" in result, result
        found: int = result["prompt_cache_hit_tokens"]
        return found

    def pause(self, **asked: object) -> None:
        """Pause the adapter and resume it."""
        for action, body in (("pause", asked), ("resume", {})):
            answer = self.raw.post(f"/adapters/{self.run}/{action}", **body)
            assert answer.status_code == 200, answer.text


@pytest.fixture
def readers(vllm_service: Service) -> Iterator[tuple[Reader, Reader]]:
    """Two tenants' readers, whose prompts are cached."""
    made = Reader(vllm_service, vllm_service.key, 65), Reader(vllm_service, vllm_service.other_key, 66)
    for one in made:
        assert one.hits() == 0
        assert 0 < one.hits() < LENGTH
    yield made
    for one in made:
        one.raw.close()


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_keeps_the_cache_by_default_and_clears_it_when_asked(readers: tuple[Reader, Reader], mode: str) -> None:
    mine, others = readers
    cached = mine.hits()
    mine.pause(mode=mode)
    assert mine.hits() == cached
    mine.pause(mode=mode, clear_cache=True)
    assert mine.hits() == 0
    assert mine.hits() == cached
    assert others.hits() == cached, "another tenant's cache was cleared"


def test_an_operator_clears_the_cache_of_a_whole_base(vllm_service: Service, readers: tuple[Reader, Reader]) -> None:
    def gate(action: str, *options: str) -> None:
        weft(vllm_service.data, "gate", action, "--pool", BASE_NAME, *options)

    cached = readers[0].hits()
    gate("pause")
    gate("resume")
    assert [one.hits() for one in readers] == [cached, cached]
    gate("pause", "--clear-cache")
    gate("resume")
    assert [one.hits() for one in readers] == [0, 0]
