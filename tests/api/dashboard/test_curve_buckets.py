"""Curves in buckets: bounded, with every spike, and the same whether they are read at once or as they grow."""

import math
import random
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

import pytest

from api.dashboard.curve_buckets import MOST_ENTRIES, CurveBuckets
from tenants.curves import CurvePoint

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def made(step: int, value: float | None, is_broken: bool = False) -> CurvePoint:
    return CurvePoint(step, BEGIN + timedelta(seconds=step), value, is_broken)


def noisy(count: int) -> list[CurvePoint]:
    rnd = random.Random(7)
    return [made(step, math.exp(-step / count) + rnd.gauss(0, 0.05)) for step in range(1, count + 1)]


def columns(points: list[CurvePoint], *, at_once: int | None = None):
    buckets = CurveBuckets()
    for begin in range(0, len(points), at_once or len(points) or 1):
        buckets.add(points[begin : begin + (at_once or len(points))])
    return buckets.columns()


def test_a_short_curve_is_sent_as_it_is() -> None:
    points = noisy(MOST_ENTRIES)
    told = columns(points)
    assert told.width == 1
    assert told.step == [point.step for point in points]
    assert told.value == told.mean == [point.value for point in points]
    assert told.count == [1] * MOST_ENTRIES


@pytest.mark.parametrize("count", [2001, 4096, 200_000])
def test_a_long_curve_is_bounded_and_has_every_buckets_extremes(count: int) -> None:
    points = noisy(count)
    points[count // 2] = made(count // 2 + 1, 1000.0)
    points[count // 3] = made(count // 3 + 1, -1000.0)
    told = columns(points)
    assert MOST_ENTRIES / 4 < len(told.step) <= MOST_ENTRIES
    assert told.points == count
    assert told.last_step == count
    assert told.step == sorted(set(told.step))
    assert {1000.0, -1000.0} <= set(told.value)
    values = {point.step: point.value for point in points}
    assert all(values[step] == value for step, value in zip(told.step, told.value, strict=True))
    assert sum(told.count) == count
    whole = sum(point.value or 0 for point in points)
    summed = sum((mean or 0) * number for mean, number in zip(told.mean, told.count, strict=True))
    assert summed == pytest.approx(whole)


def test_a_curve_that_grows_is_the_same_as_one_that_is_read_whole() -> None:
    points = noisy(9000)
    grown, whole = columns(points, at_once=7), columns(points)
    # Sums of floats depend on their order.
    assert grown.mean == pytest.approx(whole.mean)
    assert {**asdict(grown), "mean": None} == {**asdict(whole), "mean": None}


def test_a_step_without_a_number_is_a_gap_and_one_that_is_not_finite_is_told() -> None:
    points: list[CurvePoint] = list(noisy(10))
    points[3], points[7] = made(4, None), made(8, None, is_broken=True)
    told = columns(points)
    assert (told.value[3], told.count[3]) == (None, 0)
    assert (told.value[7], told.count[7]) == (None, 0)
    assert (told.broken, told.broken_points) == ([8], 1)


def test_nothing_is_a_curve_too() -> None:
    assert columns([]).step == []
