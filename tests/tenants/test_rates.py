"""The rate algorithm: no window lets more through than the burst and what the rate works off in it, and none is wasted."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.rates import Pace, RateState

START = datetime(2026, 1, 1, tzinfo=UTC)
ARRIVALS = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 600)), min_size=1, max_size=30)


def released(pace: Pace, arrivals: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the seconds from the start at which each operation may run, with its tokens. Arrivals are gaps in seconds."""
    state, seconds, found = RateState.fresh(pace, START), 0.0, []
    for gap, tokens in arrivals:
        seconds += gap
        now = START + timedelta(seconds=seconds)
        found.append((seconds + state.wait(state.charged, tokens, now), tokens))
        state = state.charged_with(tokens, now)
    return found


@given(ARRIVALS, st.integers(1, 3000), st.integers(600, 2000))
def test_no_window_lets_more_through_than_the_rate_and_the_burst(
    arrivals: list[tuple[float, int]], a_minute: int, burst: int
) -> None:
    pace = Pace(a_minute / 60, burst)
    line = released(pace, arrivals)
    for first, (begin, _) in enumerate(line):
        through = 0
        for end, tokens in line[first:]:
            through += tokens
            assert through <= burst + pace.per_second * (end - begin) + 0.01


@given(ARRIVALS, st.integers(60, 3000), st.integers(1, 2000))
def test_nothing_waits_while_nothing_is_before_it(arrivals: list[tuple[float, int]], a_minute: int, burst: int) -> None:
    """An operation waits only as long as what is before it takes, also one that is larger than the burst."""
    pace = Pace(a_minute / 60, burst)
    seconds, before, worked_off = 0.0, 0, 0.0
    for (gap, tokens), (runs_at, _) in zip(arrivals, released(pace, arrivals), strict=True):
        seconds += gap
        worked_off = max(worked_off, seconds)
        latest = worked_off - max(burst - tokens, 0) / pace.per_second
        assert runs_at == pytest.approx(max(seconds, latest), abs=1e-3)
        worked_off += tokens / pace.per_second
        before += tokens


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 500))
def test_what_goes_back_lets_those_behind_run_earlier_by_as_much(first: int, second: int, rest: int) -> None:
    pace = Pace(10.0, 100)
    state = RateState.fresh(pace, START).charged_with(first, START)
    mark = state.charged
    state = state.charged_with(second, START)
    before = (first - max(100 - second, 0)) / 10
    assert state.wait(mark, second, START) == pytest.approx(max(0.0, before), abs=1e-3)
    earlier = replace(state, tat=state.tat - min(rest, first) / 10)
    assert earlier.wait(mark, second, START) == pytest.approx(max(0.0, before - min(rest, first) / 10), abs=1e-3)
