"""The state machine of an attempt: which moves are legal, and what each state tells."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from contracts.errors import EngineFailure
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, SampleRequest, SamplingParams
from engine.sampling.replica import AdapterVersion
from workers.sampling.attempt import MOVES, Attempt, AttemptState
from workers.sampling.router import RoutedReplica
from workers.sampling.weight_source import WeightSource

RUNNING, CUT, LEFT, ABORTED, ENDED = AttemptState
LEGAL = {
    (RUNNING, CUT),
    (RUNNING, LEFT),
    (RUNNING, ABORTED),
    (RUNNING, ENDED),
    (CUT, ABORTED),
    (CUT, ENDED),
    (LEFT, ABORTED),
    (LEFT, ENDED),
    (ABORTED, ENDED),
}
WAYS: dict[AttemptState, list[AttemptState]] = {
    RUNNING: [],
    CUT: [CUT],
    LEFT: [LEFT],
    ABORTED: [ABORTED],
    ENDED: [ENDED],
}


def source(name: str, publication: int = 0) -> WeightSource:
    return WeightSource(RunId("cat:train:0"), AdapterVersion(name, Path(name)), True, publication)


def attempt_in(state: AttemptState) -> Attempt:
    """An attempt of an inflight sampler that draws from ``old`` and whose sampler follows ``new`` by now."""
    request = SampleRequest(np.array([1, 2]), 1, SamplingParams(max_tokens=4))
    operation = ReadyOperation(RequestId("sample"), 1, TenantId("cat"), "sampler", 7, OperationKind.SAMPLE, request, 0)
    attempt = Attempt(operation, source("old"), RoutedReplica(None), 1)  # type: ignore[arg-type]
    attempt.newer = source("new", 1)
    for step in WAYS[state]:
        attempt.move(step)
    return attempt


@pytest.mark.parametrize("to", AttemptState)
@pytest.mark.parametrize("state", AttemptState)
async def test_a_move_is_made_if_the_table_has_it_and_raises_else(state: AttemptState, to: AttemptState) -> None:
    attempt = attempt_in(state)
    assert attempt.may_move(to) is ((state, to) in LEGAL)
    if (state, to) in LEGAL:
        attempt.move(to)
        assert attempt.state is to
        return
    before = (attempt.state, attempt.before_end, attempt.left_at, attempt.left.done())
    with pytest.raises(RuntimeError, match=f"cannot move from {state.value} to {to.value}"):
        attempt.move(to)
    assert before == (attempt.state, attempt.before_end, attempt.left_at, attempt.left.done())


def test_every_state_has_its_moves() -> None:
    assert set(MOVES) == set(AttemptState)
    assert {(state, to) for state, moves in MOVES.items() for to in moves} == LEGAL


@pytest.mark.parametrize("state", [RUNNING, CUT, LEFT, ABORTED])
async def test_an_attempt_that_has_ended_still_tells_how_it_was_cut(state: AttemptState) -> None:
    attempt = attempt_in(state)
    for _ in range(2):
        assert attempt.before_end is state
        assert attempt.is_cut is (state is not RUNNING)
        assert attempt.left.done() is (state is LEFT)
        assert (attempt.left_at is not None) is (state is LEFT)
        if attempt.state is not ENDED:
            attempt.move(ENDED)
    assert attempt.state is ENDED


async def test_an_aborted_sample_that_was_left_stays_left_alone_by_its_streams() -> None:
    """The replica aborts its requests already; the sample ends instead of resuming."""
    attempt = attempt_in(LEFT)
    left_at = attempt.left_at
    attempt.move(ABORTED)
    assert attempt.left.done()
    assert attempt.left_at == left_at
    assert attempt.resumes_on(None) is None


@pytest.mark.parametrize("state", [RUNNING, CUT, LEFT, ABORTED])
async def test_only_an_attempt_that_was_left_and_did_not_fail_resumes_in_flight(state: AttemptState) -> None:
    attempt = attempt_in(state)
    attempt.move(ENDED)
    assert attempt.resumes_on(None) is (attempt.newer if state is LEFT else None)
    assert attempt.resumes_on(EngineFailure("gone")) is None


async def test_who_waits_for_being_left_is_woken() -> None:
    attempt = attempt_in(RUNNING)
    assert not attempt.left.done()
    attempt.move(LEFT)
    attempt.move(ENDED)
    await asyncio.wait_for(attempt.left, 5.0)


async def test_both_versions_are_in_use_once_a_newer_one_is_known() -> None:
    attempt = attempt_in(RUNNING)
    assert [attempt.uses(name) for name in ("old", "new", "other")] == [True, True, False]
    attempt.newer = None
    assert [attempt.uses(name) for name in ("old", "new")] == [True, False]
    assert attempt.key == ("sampler", 7)
