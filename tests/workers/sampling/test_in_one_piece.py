"""Samples whose rules look back on their own tokens are drawn in one piece: a cut begins them anew, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contracts.logit_rules import Grammar, LogitRules
from contracts.operations import SampleRequest, SamplingParams
from engine.sampling.replica import AdapterVersion, Ended, GenerateRequest, NewToken
from workers.sampling.continuation import Continuation
from workers.sampling.stop_conditions import StopRules

PROMPT = [5, 6, 7]
OLD = AdapterVersion("run@1", Path("1"))
NEW = AdapterVersion("run@2", Path("2"))
LOOK_BACK = [
    LogitRules(frequency_penalty=0.5),
    LogitRules(presence_penalty=-1.0),
    LogitRules(grammar=Grammar("json_object")),
]


def begun(rules: LogitRules | None, n: int = 1) -> Continuation:
    params = SamplingParams(max_tokens=9, seed=4)
    request = SampleRequest(np.array(PROMPT, np.int64), n, params, logit_rules=rules)
    return Continuation("op", request, StopRules(9, frozenset({0}), (), None))


def give(continuation: Continuation, request: GenerateRequest, *tokens: int, index: int = 0) -> None:
    """Have ``tokens`` come in, and then a cut."""
    for event in [*(NewToken(index, token, -1.0) for token in tokens), Ended(index, "cut")]:
        continuation.take(request, event)


@pytest.mark.parametrize("rules", LOOK_BACK)
def test_a_cut_begins_the_sample_anew(rules: LogitRules) -> None:
    continuation = begun(rules)
    (first,) = continuation.requests(OLD, 1)
    assert first.logit_rules == rules
    give(continuation, first, 10, 11)
    assert (continuation.made, continuation.kept) == (2, 0)
    (again,) = continuation.requests(NEW, 2)
    assert again.prompt.tolist() == PROMPT
    assert (again.seeds, again.max_tokens) == (first.seeds, first.max_tokens)
    assert (continuation.made, continuation.restarts) == (0, 1)
    give(continuation, again, 12, 0)
    (sequence,) = continuation.output().sequences
    assert sequence.tokens.tolist() == [12, 0]
    assert [span.version for span in continuation.spans()[0]] == ["run@2"]


def test_sequences_that_have_ended_stay_and_are_published_again() -> None:
    continuation = begun(LOOK_BACK[0], 3)
    (first,) = continuation.requests(OLD, 1)
    give(continuation, first, 10, 11, index=0)
    give(continuation, first, 20, 0, index=1)
    assert len(continuation.new_tokens(100)) == 2
    left = continuation.requests(OLD, 2)
    assert [request.prompt.tolist() for request in left] == [PROMPT, PROMPT]
    assert [request.seeds for request in left] == [first.seeds[:1], first.seeds[2:]]
    assert (continuation.made, continuation.kept) == (2, 2)
    (again,) = continuation.new_tokens(100)
    assert (again.sequence, again.start, again.tokens, again.restarts) == (1, 0, [20, 0], 1)


@pytest.mark.parametrize("rules", [None, LogitRules(biases=[(3, 1.0)])])
def test_other_samples_go_on_where_they_were_cut(rules: LogitRules | None) -> None:
    continuation = begun(rules)
    give(continuation, continuation.requests(OLD, 1)[0], 10, 11)
    assert continuation.kept == 2
    (rest,) = continuation.requests(OLD, 2)
    assert rest.prompt.tolist() == [*PROMPT, 10, 11]
    assert (rest.logit_rules, continuation.restarts) == (rules, 0)


def test_what_another_process_has_drawn_is_dropped_too() -> None:
    earlier: Any = begun(LOOK_BACK[2])
    give(earlier, earlier.requests(OLD, 1)[0], 10, 11)
    later = begun(LOOK_BACK[2])
    later.resume(earlier.so_far(), earlier.reports(), restarts=3)
    (request,) = later.requests(OLD, 2)
    assert (request.prompt.tolist(), later.restarts) == (PROMPT, 4)
