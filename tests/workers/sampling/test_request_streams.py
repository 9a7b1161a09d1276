"""Running a sample: against replicas that fail where the test says so, and on the one in this process."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import EngineFailure, InvalidRequest
from contracts.operations import SampleOutput, SampleRequest, SamplingParams
from contracts.sample_report import VersionSpan
from contracts.vocabulary import BaseVocabulary
from engine.model.base import BaseModel
from engine.sampling.in_process.replica import TorchReplica
from engine.sampling.replica import (
    AdapterVersion,
    Ended,
    GenerateEvent,
    GenerateRequest,
    NewToken,
    ReplicaHealth,
    SamplerReplica,
)
from engine.sampling.vocabulary import read_vocabulary
from workers.sampling.continuation import Continuation
from workers.sampling.request_streams import stream_requests
from workers.sampling.retry_patience import MOST_FRUITLESS_ATTEMPTS, RetryPatience
from workers.sampling.sample_request import stop_rules
from workers.sampling.stop_conditions import StopRules

PROMPT = [72, 101, 108, 108, 111]
DEADLINE_S = 60.0

Script = Callable[[GenerateRequest, int], AsyncGenerator[Sequence[GenerateEvent]]]


class ScriptedReplica:
    """Plays ``script`` (request, its number) for each request, and notes what is asked of it."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[GenerateRequest] = []
        self.cuts: list[tuple[str, int | None]] = []
        self.left: list[str] = []

    @property
    def name(self) -> str:
        return "scripted"

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        self.requests.append(request)
        try:
            async for events in self._script(request, len(self.requests)):
                yield events
        except (GeneratorExit, asyncio.CancelledError):
            self.left.append(request.request_id)
            raise

    async def cut(self, request_id: str, index: int | None = None) -> bool:
        self.cuts.append((request_id, index))
        return True

    async def load(self, version: AdapterVersion, *, owner: str = "", share: float = 1.0) -> None: ...

    async def unload(self, name: str) -> None: ...

    async def health(self) -> ReplicaHealth:
        return ReplicaHealth(True, 0, 0, ())


def wanted(n: int = 1, max_tokens: int = 40, strings: tuple[str, ...] = ()) -> Continuation:
    sample = SampleRequest(np.array(PROMPT, np.int64), n, SamplingParams(seed=1))
    return Continuation("op", sample, StopRules(max_tokens, frozenset(), strings, lambda ids: "".join(map(chr, ids))))


def next_token(request: GenerateRequest, index: int = 0) -> NewToken:
    return NewToken(index, len(request.prompt), -1.0)


async def run(replica: SamplerReplica, continuation: Continuation) -> SampleOutput:
    async with asyncio.timeout(DEADLINE_S):
        patience, attempts = RetryPatience(), 0
        while not continuation.finished:
            attempts += 1
            before = continuation.made
            failure = await stream_requests(replica, continuation, continuation.requests(None, attempts))
            if continuation.finished:
                break
            # Nobody here asks for a cut.
            failure = failure or EngineFailure("the replica cut it")
            patience.pause_after(failure, made=continuation.made - before)
        return continuation.output()


async def test_progress_between_failures_goes_on_for_ever() -> None:
    async def one_token_then_failure(request: GenerateRequest, number: int) -> Any:
        yield [next_token(request)]
        raise EngineFailure("gone")

    replica = ScriptedReplica(one_token_then_failure)
    output = await run(replica, wanted())
    assert output.sequences[0].tokens.tolist() == list(range(5, 45))
    assert len(replica.requests) == 40


async def test_attempts_without_progress_are_counted_from_the_last_token() -> None:
    async def once(request: GenerateRequest, number: int) -> Any:
        if number == 4:
            yield [next_token(request)]
        raise EngineFailure(f"gone {number}")

    replica = ScriptedReplica(once)
    with pytest.raises(EngineFailure, match=r"no progress in 8 attempts.*gone 12"):
        await run(replica, wanted())
    assert len(replica.requests) == 4 + MOST_FRUITLESS_ATTEMPTS


async def test_being_cut_for_ever_is_an_error_too() -> None:
    async def cut(request: GenerateRequest, number: int) -> Any:
        yield [Ended(0, "cut")]

    with pytest.raises(EngineFailure, match="cut it"):
        await run(ScriptedReplica(cut), wanted())


async def test_what_the_caller_must_change_is_not_tried_again() -> None:
    async def refuse(request: GenerateRequest, number: int) -> Any:
        raise InvalidRequest("no")
        yield []

    replica = ScriptedReplica(refuse)
    with pytest.raises(InvalidRequest, match="no"):
        await run(replica, wanted())
    assert len(replica.requests) == 1


async def test_a_failure_of_one_sequence_lets_the_others_end() -> None:
    async def script(request: GenerateRequest, number: int) -> Any:
        if number == 1:
            yield [next_token(request, index) for index in range(3)]
            raise EngineFailure("gone")
        if number == 2:
            raise EngineFailure("gone again")
        while True:
            yield [NewToken(0, 1, -1.0)]

    replica = ScriptedReplica(script)
    output = await run(replica, wanted(3, max_tokens=4))
    assert [len(sequence.tokens) for sequence in output.sequences] == [4] * 3
    assert [len(request.prompt) for request in replica.requests] == [5, 6, 6, 6, 6]
    assert len({request.request_id for request in replica.requests}) == 5


async def test_a_sequence_with_the_stop_string_is_cut_and_the_others_go_on() -> None:
    async def script(request: GenerateRequest, number: int) -> Any:
        yield [NewToken(0, ord("a"), -1.0), NewToken(1, ord("b"), -1.0)]
        yield [NewToken(0, ord("b"), -1.0), NewToken(1, ord("b"), -1.0)]
        # It was told after the batch that completed the string, before it was asked for more.
        assert replica.cuts == [(request.request_id, 0)]
        yield [NewToken(0, ord("x"), -1.0), NewToken(1, ord("b"), -1.0)]
        yield [Ended(0, "cut"), Ended(1, "length")]

    replica = ScriptedReplica(script)
    output = await run(replica, wanted(2, max_tokens=3, strings=("ab",)))
    assert [sequence.tokens.tolist() for sequence in output.sequences] == [list(b"ab"), list(b"bbb")]
    assert [sequence.stop_reason for sequence in output.sequences] == ["stop", "length"]


async def test_a_request_with_nothing_left_is_left() -> None:
    async def babble(request: GenerateRequest, number: int) -> Any:
        while True:
            yield [NewToken(0, ord("a"), -1.0)]

    replica = ScriptedReplica(babble)
    output = await run(replica, wanted(strings=("aaa",)))
    assert output.sequences[0].tokens.tolist() == list(b"aaa")
    assert replica.left == ["op.1"]


async def test_cancelling_leaves_the_requests() -> None:
    begun = asyncio.Event()

    async def hang(request: GenerateRequest, number: int) -> Any:
        yield [next_token(request)]
        begun.set()
        await asyncio.Event().wait()

    replica = ScriptedReplica(hang)
    running = asyncio.create_task(run(replica, wanted()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert replica.left == ["op.1"]


class Brittle(TorchReplica):
    """Dies under each request after a few of its tokens, seen from outside."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[GenerateEvent]]:
        seen: Counter[type] = Counter()
        async with aclosing(super().generate(request)) as batches:
            async for events in batches:
                yield events
                seen.update(map(type, events))
                if seen[NewToken] >= 7:
                    raise EngineFailure("died")


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    return BaseModel.load(read_base_model_facts("tiny", tiny_model_dir, None), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def vocabulary(tiny_model_dir: Path) -> BaseVocabulary:
    return read_vocabulary(tiny_model_dir)


class TestInProcess:
    """Streams of the torch replica, on the tiny base."""

    @staticmethod
    @asynccontextmanager
    async def serving(replica: TorchReplica) -> AsyncIterator[TorchReplica]:
        await replica.start()
        try:
            yield replica
        finally:
            await replica.close()

    @staticmethod
    def continuation(
        facts: BaseModelFacts, vocabulary: BaseVocabulary, params: SamplingParams, **asked: Any
    ) -> Continuation:
        sample = SampleRequest(np.array(PROMPT, np.int64), asked.pop("n", 1), params, **asked)
        return Continuation("op", sample, stop_rules(sample, facts, vocabulary))

    async def test_stop_strings_straddle_tokens(self, base: BaseModel, vocabulary: BaseVocabulary) -> None:
        free = SamplingParams(max_tokens=200, seed=11, temperature=2.0, stop_tokens=[])
        assert vocabulary.decode is not None
        async with self.serving(TorchReplica(base)) as replica:
            drawn = (await run(replica, self.continuation(base.facts, vocabulary, free))).sequences[0].tokens.tolist()
            text = vocabulary.decode(drawn)
            string = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii())
            strict = SamplingParams(max_tokens=200, seed=11, temperature=2.0, stop_strings=["not there", string])
            (stopped,) = (await run(replica, self.continuation(base.facts, vocabulary, strict))).sequences
        tokens = stopped.tokens.tolist()
        assert tokens == drawn[: len(tokens)]
        assert string in vocabulary.decode(tokens)
        assert string not in vocabulary.decode(tokens[:-1])
        assert stopped.stop_reason == "stop"

    async def test_dying_again_and_again_changes_no_greedy_sample(
        self, base: BaseModel, vocabulary: BaseVocabulary
    ) -> None:
        params = SamplingParams(max_tokens=60, temperature=0, stop_tokens=[])
        outputs = []
        for kind in (TorchReplica, Brittle):
            asked = self.continuation(base.facts, vocabulary, params, n=3, prompt_logprobs=True)
            async with self.serving(kind(base)) as replica:
                outputs.append(await run(replica, asked))
            assert asked.spans() == [[VersionSpan(None, 0, 60)]] * 3
        whole, joined = outputs
        for left, right in zip(whole.sequences, joined.sequences, strict=True):
            assert left.tokens.tolist() == right.tokens.tolist()
            np.testing.assert_allclose(left.logprobs, right.logprobs, atol=1e-5)
        assert whole.prompt_logprobs is not None
        np.testing.assert_allclose(whole.prompt_logprobs, joined.prompt_logprobs, atol=1e-5)
