"""Samples over several attempts: nothing is lost, repeated, asked twice or put down to the wrong weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.errors import EngineFailure
from contracts.logit_rules import LogitRules
from contracts.operations import (
    EMPTY_LOGPROB,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
    TopkLogprobs,
)
from contracts.prompt_cells import PromptAltTokens, PromptCells
from contracts.sample_report import SequenceReport, VersionSpan
from engine.sampling.replica import (
    AdapterVersion,
    Ended,
    EndReason,
    GenerateRequest,
    NewToken,
    PromptCached,
    PromptScored,
    PromptScoring,
)
from workers.sampling.continuation import TOKENS_AT_A_TIME, Continuation, segment_seed
from workers.sampling.stop_conditions import StopRules

PROMPT = [5, 6, 7]
OLD = AdapterVersion("run@1", Path("1"))
NEW = AdapterVersion("run@2", Path("2"))


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def sample(n: int = 1, **asked: Any) -> SampleRequest:
    params = SamplingParams(seed=asked.pop("seed", None), temperature=0.5, top_k=9, top_p=0.9)
    return SampleRequest(np.array(PROMPT, np.int64), n, params, **asked)


def begun(n: int = 1, *, max_tokens: int = 20, strings: tuple[str, ...] = (), **asked: Any) -> Continuation:
    rules = StopRules(max_tokens, frozenset({0}), strings, text if strings else None)
    return Continuation("op", sample(n, **asked), rules, cache_salt="tenant")


def give(
    continuation: Continuation, request: GenerateRequest, *tokens: int, index: int = 0, end: EndReason | None = "cut"
) -> list[int]:
    """Have ``tokens`` come in, and then the end; returns which sequences were to be cut."""
    events = [NewToken(index, token, -token / 100) for token in tokens]
    found = [continuation.take(request, event) for event in [*events, *([Ended(index, end)] if end else [])]]
    return [cut for cut in found if cut is not None]


def tokens_of(continuation: Continuation) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in continuation.output().sequences]


def test_uncut_it_is_one_request_with_all_that_was_asked() -> None:
    continuation = begun(3, seed=4, topk_sample_logprobs=2, prompt_logprobs=True, prompt_logprobs_last_n=1)
    (request,) = continuation.requests(OLD, 1)
    assert request.prompt.tolist() == PROMPT
    assert request.prompt.dtype == np.int64
    assert request.seeds == tuple(segment_seed(4, index, 0) for index in range(3))
    expected = replace(
        request,
        max_tokens=20,
        temperature=0.5,
        top_k=9,
        top_p=0.9,
        stop_tokens=frozenset({0}),
        topk=2,
        scoring=PromptScoring(2, True, 0),
        adapter=OLD,
        cache_salt="tenant",
    )
    assert request == expected


def test_several_cuts_join_into_one_sequence() -> None:
    continuation = begun(max_tokens=6)
    given = [(10, 11), (12,), (13, 14), (15,)]
    so_far: list[int] = []
    ids = set()
    for attempt, tokens in enumerate(given):
        (request,) = continuation.requests(OLD, attempt)
        ids.add(request.request_id)
        assert request.prompt.tolist() == PROMPT + so_far
        assert request.max_tokens == 6 - len(so_far)
        assert not continuation.finished
        so_far += tokens
        assert give(continuation, request, *tokens, end="cut" if len(so_far) < 6 else "length") == []
    assert len(ids) == len(given)
    assert continuation.finished
    assert continuation.made == 6
    (sequence,) = continuation.output().sequences
    assert sequence.tokens.tolist() == so_far
    assert sequence.tokens.dtype == np.int32
    assert sequence.stop_reason == "length"
    assert sequence.logprobs.dtype == np.float32
    np.testing.assert_allclose(sequence.logprobs, [-token / 100 for token in so_far], rtol=1e-6)


def test_three_sequences_go_on_each_from_its_own_place() -> None:
    continuation = begun(3, max_tokens=4, seed=1)
    (first,) = continuation.requests(OLD, 1)
    give(continuation, first, 20, 21, index=0)
    give(continuation, first, 30, 0, index=1, end="stop")
    give(continuation, first, index=2)
    left = continuation.requests(OLD, 2)
    assert [request.prompt.tolist() for request in left] == [[*PROMPT, 20, 21], PROMPT]
    assert [request.max_tokens for request in left] == [2, 4]
    assert [request.seeds for request in left] == [(segment_seed(1, 0, 2),), (segment_seed(1, 2, 0),)]
    # Each of these requests numbers its sequences from 0.
    give(continuation, left[1], 40, 41, 42, 43, end="length")
    assert continuation.has_ended(left[1])
    assert not continuation.has_ended(left[0])
    give(continuation, left[0], 22, 0, end="stop")
    assert tokens_of(continuation) == [[20, 21, 22, 0], [30, 0], [40, 41, 42, 43]]
    assert [sequence.stop_reason for sequence in continuation.output().sequences] == ["stop", "stop", "length"]


def test_tokens_are_asked_for_one_by_one_where_each_matters_and_else_together() -> None:
    unheeded, followed, stopped = begun(2), begun(2), begun(2, strings=("e",))
    assert [request.tokens_at_a_time for request in unheeded.requests(OLD, 1)] == [TOKENS_AT_A_TIME]
    assert [request.tokens_at_a_time for request in followed.requests(OLD, 1, is_followed=True)] == [1]
    assert [request.tokens_at_a_time for request in stopped.requests(OLD, 1)] == [1]


def test_cut_before_the_first_token_asks_the_same_again() -> None:
    continuation = begun(2, seed=3)
    (first,) = continuation.requests(OLD, 1)
    give(continuation, first, index=0)
    give(continuation, first, index=1)
    (again,) = continuation.requests(OLD, 2)
    assert again.request_id != first.request_id
    assert again.seeds == first.seeds
    np.testing.assert_array_equal(again.prompt, first.prompt)
    assert continuation.spans() == [[], []]


def test_a_stop_string_across_a_cut_stops() -> None:
    continuation = begun(strings=("stop",))
    (first,) = continuation.requests(OLD, 1)
    assert give(continuation, first, *map(ord, "go st")) == []
    (second,) = continuation.requests(OLD, 2)
    # What the replica drew before it heard of the cut is no part of it.
    assert give(continuation, second, *map(ord, "op it")) == [0]
    assert continuation.finished
    (sequence,) = continuation.output().sequences
    assert text(sequence.tokens.tolist()) == "go stop"
    assert sequence.stop_reason == "stop"
    assert len(sequence.logprobs) == len("go stop")
    assert continuation.spans() == [[VersionSpan("run@1", 0, 7)]]


def test_only_the_sequence_with_the_stop_string_is_to_be_cut() -> None:
    continuation = begun(2, strings=("ab",))
    (request,) = continuation.requests(None, 1)
    assert give(continuation, request, *map(ord, "xxab"), index=1, end=None) == [1]
    assert give(continuation, request, *map(ord, "xxa"), index=0, end=None) == []
    assert not continuation.has_ended(request)
    assert give(continuation, request, ord("b"), index=0, end=None) == [0]
    assert continuation.has_ended(request)


def test_a_stop_token_needs_no_cut() -> None:
    continuation = begun(strings=("ab",))
    (request,) = continuation.requests(None, 1)
    assert give(continuation, request, 70, 0, end="stop") == []
    assert continuation.finished


def test_a_cleared_cache_is_read_under_no_later_salt() -> None:
    continuation = begun()
    salts = []
    for clears in (0, 1, 2):
        continuation.cache_clears = clears
        (request,) = continuation.requests(OLD, clears)
        salts.append(request.cache_salt)
    assert salts[0] == "tenant"
    assert len(set(salts)) == 3
    assert not any("/" in str(salt) for salt in salts), "vLLM refuses slashes"
    assert all(salt is not None and salt.startswith("tenant") for salt in salts)


def test_seeds_do_not_repeat() -> None:
    seeds = {segment_seed(7, index, start) for index in range(20) for start in range(50)}
    assert len(seeds) == 20 * 50
    assert not seeds & {segment_seed(8, index, start) for index in range(20) for start in range(50)}
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert segment_seed(7, 0, 0) == 7
    assert segment_seed(None, 3, 4) is None
    assert segment_seed(-(2**63), 1, 0) != segment_seed(2**63, 1, 0)


def scores(*values: float) -> PromptScored:
    topk = TopkLogprobs(np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32))
    return PromptScored(np.array(values, np.float32), topk)


def test_the_prompt_is_scored_once_and_never_what_was_generated() -> None:
    continuation = begun(prompt_logprobs=True, topk_prompt_logprobs=1)
    (first,) = continuation.requests(OLD, 1)
    assert first.scoring == PromptScoring(1, True, 1)
    give(continuation, first)
    (second,) = continuation.requests(OLD, 2)
    assert second.scoring == first.scoring
    found = scores(np.nan, -1, -2)
    continuation.take(second, found)
    give(continuation, second)
    (third,) = continuation.requests(OLD, 3)
    assert third.scoring is None
    give(continuation, third, 8)
    (fourth,) = continuation.requests(OLD, 4)
    assert fourth.scoring is None
    give(continuation, fourth, 0, end="stop")
    output = continuation.output()
    assert output.prompt_logprobs is found.logprobs
    assert output.topk_prompt_logprobs is found.topk


@pytest.mark.parametrize("how", ["left", "restarted", "restarted elsewhere", "in one piece"])
def test_the_prompt_is_scored_by_the_version_that_draws_from_the_first_token_on(how: str) -> None:
    """A neighbour that keeps a token keeps its scores."""
    rules = LogitRules(presence_penalty=1.0) if how == "in one piece" else None
    mine = begun(prompt_logprobs=True, logit_rules=rules)
    beside = begun(prompt_logprobs=True)
    old, new = scores(np.nan, -1, -2), scores(np.nan, -3, -4)
    for one in (mine, beside):
        (first,) = one.requests(OLD, 1)
        one.take(first, old)
        give(one, first, *([] if one is mine and how == "left" else [8]))
    if how == "restarted elsewhere":
        before, mine = mine, begun(prompt_logprobs=True)
        mine.resume(before.so_far(), before.reports(), restarts=0)
        mine.scored_version = before.scored_version
    if "restarted" in how:
        mine.restart()
    (again,), (further,) = mine.requests(NEW, 2), beside.requests(NEW, 2)
    assert (again.scoring, further.scoring) == (PromptScoring(1, True, 0), None)
    mine.take(again, new)
    for one, request in ((mine, again), (beside, further)):
        give(one, request, 0, end="stop")
    assert mine.output().prompt_logprobs is new.logprobs
    assert beside.output().prompt_logprobs is old.logprobs
    assert (mine.scored_version, beside.scored_version) == (NEW.name, OLD.name)


@pytest.mark.parametrize(
    "bad",
    [
        PromptScored(None, scores(0, 0, 0).topk),
        replace(scores(np.nan, -1, -2), topk=None),
        scores(np.nan, -1, np.nan),
        scores(np.nan, -1),
    ],
)
def test_a_missing_prompt_logprob_is_an_error(bad: PromptScored) -> None:
    continuation = begun(prompt_logprobs=True, topk_prompt_logprobs=1)
    (request,) = continuation.requests(None, 1)
    with pytest.raises(EngineFailure, match="prompt"):
        continuation.take(request, bad)


def test_tokens_do_not_come_before_the_scores() -> None:
    continuation = begun(prompt_logprobs=True)
    (request,) = continuation.requests(None, 1)
    with pytest.raises(EngineFailure, match="before the scores"):
        continuation.take(request, NewToken(0, 8, -1.0))
    assert continuation.made == 0


def test_scores_that_nobody_asked_for_are_an_error() -> None:
    continuation = begun()
    (request,) = continuation.requests(None, 1)
    with pytest.raises(EngineFailure, match="not asked"):
        continuation.take(request, scores(np.nan, -1, -2))


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_missing_logprob_is_an_error_and_the_tokens_before_stay(logprob: float) -> None:
    continuation = begun()
    (request,) = continuation.requests(None, 1)
    give(continuation, request, 8, end=None)
    with pytest.raises(EngineFailure, match="logprob"):
        continuation.take(request, NewToken(0, 9, logprob))
    (rest,) = continuation.requests(None, 2)
    assert rest.prompt.tolist() == [*PROMPT, 8]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_end_that_is_none_is_an_error(reason: EndReason) -> None:
    continuation = begun()
    (request,) = continuation.requests(None, 1)
    with pytest.raises(EngineFailure, match="to go on"):
        give(continuation, request, 8, end=reason)
    assert not continuation.finished
    with pytest.raises(EngineFailure, match="not finished"):
        continuation.output()


def test_likeliest_tokens_are_joined_and_short_rows_filled() -> None:
    continuation = begun(max_tokens=3, topk_sample_logprobs=3)

    def token(number: int, k: int) -> NewToken:
        row = np.arange(k, dtype=np.int32), -np.arange(k, dtype=np.float32)
        return NewToken(0, number, -1.0, row)

    (first,) = continuation.requests(OLD, 1)
    continuation.take(first, token(8, 3))
    (second,) = continuation.requests(NEW, 2)
    with pytest.raises(EngineFailure, match="likeliest"):
        continuation.take(second, NewToken(0, 9, -1.0))
    continuation.take(second, token(9, 3))
    continuation.take(second, token(10, 2))
    topk = continuation.output().sequences[0].topk_logprobs
    assert topk is not None
    assert topk.token_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0]]
    np.testing.assert_array_equal(topk.logprobs, np.array([[0, -1, -2], [0, -1, -2], [0, -1, EMPTY_LOGPROB]], "f4"))


def test_spans_are_contiguous_and_equal_neighbours_are_one() -> None:
    continuation = begun(max_tokens=9)
    for attempt, (adapter, tokens) in enumerate([(None, (1,)), (OLD, (2, 3)), (OLD, (4,)), (NEW, ()), (OLD, (5,))]):
        (request,) = continuation.requests(adapter, attempt)
        give(continuation, request, *tokens)
    (request,) = continuation.requests(NEW, 9)
    give(continuation, request, 6, 0, end="stop")
    assert continuation.spans() == [
        [VersionSpan(None, 0, 1), VersionSpan("run@1", 1, 5), VersionSpan("run@2", 5, 7)],
    ]
    assert tokens_of(continuation) == [[1, 2, 3, 4, 5, 6, 0]]


def test_the_prompts_cache_is_counted_as_the_first_computation_found_it() -> None:
    """The first of two sequences to be computed found the least, and a later attempt finds what the sample itself left."""
    continuation = begun(2)
    (first,) = continuation.requests(OLD, 1)
    for index, cached in enumerate((2, 1)):
        continuation.take(first, PromptCached(cached))
        give(continuation, first, 8, index=index)
    for request in continuation.requests(OLD, 2):
        continuation.take(request, PromptCached(3))
    assert continuation.so_far().prompt_cache_hit_tokens == 1
    resumed = begun(2)
    resumed.resume(continuation.so_far(), continuation.reports(), restarts=0)
    for request in resumed.requests(OLD, 3):
        resumed.take(request, PromptCached(3))
        give(resumed, request, 0, index=0, end="stop")
    assert resumed.output().prompt_cache_hit_tokens == 1


def test_scores_of_targets_and_draws_outlive_the_process_that_got_them() -> None:
    cells = PromptCells(np.array([[7, -1], [-1, 8]]), 2)
    continuation = begun(target_prompt_logprobs=cells, prompt_alt_tokens_k=1)
    (first,) = continuation.requests(OLD, 1)
    assert first.scoring is not None
    assert first.scoring.targets is not None
    assert [part.tolist() for part in first.scoring.targets] == [[1, 2], [7, 8]]
    drawn = PromptAltTokens(np.array([[3], [4]]), np.array([[-1], [-2]], np.float32))
    for bad in (PromptScored(None, None, None, drawn), PromptScored(None, None, np.zeros(2, np.float32), None)):
        with pytest.raises(EngineFailure):
            continuation.take(first, bad)
    continuation.take(first, PromptScored(None, None, np.array([-0.5, -1.5], np.float32), drawn))
    give(continuation, first, 8)
    resumed = begun(target_prompt_logprobs=cells, prompt_alt_tokens_k=1)
    resumed.resume(continuation.so_far(), continuation.reports(), restarts=0)
    (second,) = resumed.requests(OLD, 2)
    assert second.scoring is None
    give(resumed, second, 0, end="stop")
    output = resumed.output()
    assert output.target_prompt_logprobs is not None
    assert output.target_prompt_logprobs.values.tolist() == [[-0.5, 0], [0, -1.5]]
    assert output.prompt_alt_tokens == drawn


def test_a_long_sample_is_taken_up_by_the_end_of_its_text() -> None:
    """No long sequence is decoded whole, and one that has ended is not decoded at all."""
    decoded = 0

    def counted(ids: list[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return text(ids)

    length = 16_000
    sequences = [
        SampledSequence("stop", np.full(length, ord("a"), np.int32), np.full(length, -1.0, np.float32))
        for _ in range(3)
    ]
    spans = [VersionSpan("run@1", 0, length)]
    reports = [SequenceReport("", spans), SequenceReport("", spans), SequenceReport("stop", spans)]
    resumed = Continuation("op", sample(3), StopRules(2 * length, frozenset({0}), ("ab", "never" * 10), counted))
    resumed.resume(SampleOutput(sequences), reports, restarts=0)
    assert resumed.unfinished == 2
    assert decoded < 500
    mine, beside = resumed.requests(OLD, 2)
    assert give(resumed, mine, ord("b")) == [0]
    assert give(resumed, beside, ord("a")) == []
