"""Curves in buckets of optimizer steps: the least and the greatest value of each, so that no spike is lost.

A bucket's width is a power of two. A curve that grows merges neighbours, so it is read once, however long it becomes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import gt, lt

from tenants.curves import CurveBucket, CurvePoint

MOST_ENTRIES = 2000
"""Entries of a curve that is sent."""
MOST_BROKEN = 100
"""Steps with a value that is not finite which are told one by one."""


@dataclass(slots=True)
class CurveColumns:
    """A curve by columns.

    - ``width``: steps of a bucket. ``points``: steps of the whole curve.
    - ``mean``, ``count``: of the bucket's values, at its last entry; the count is 0 at others, and the mean null.
    - ``broken``: the first steps whose value is not finite; ``broken_points``: how many there are.
    """

    width: int
    points: int
    last_step: int
    step: list[int]
    at: list[float]
    value: list[float | None]
    mean: list[float | None]
    count: list[int]
    broken: list[int]
    broken_points: int


class CurveBuckets:
    """A curve that is added to at its end."""

    def __init__(self, *, most: int = MOST_ENTRIES) -> None:
        self._most = most
        self.width = 1
        self._buckets: list[CurveBucket] = []
        self._broken: list[int] = []
        self._broken_points = 0
        self._points = 0
        self.last_step = -1

    @property
    def broken_left(self) -> int:
        """Number of further steps without a finite value that can be told one by one."""
        return MOST_BROKEN - len(self._broken)

    def add(self, points: Iterable[CurvePoint]) -> None:
        """Add later points, in order of their steps."""
        found = list(points)
        self.add_buckets(map(_bucket_of, found), broken=[point.step for point in found if point.is_broken])

    def add_buckets(self, buckets: Iterable[CurveBucket], *, broken: Iterable[int]) -> None:
        """Add later buckets of at most ``width`` steps, in order. ``broken``: the first steps in them that are not finite."""
        for bucket in buckets:
            self._points += bucket.points
            self._broken_points += bucket.broken
            self.last_step = bucket.last_step
            self._append(bucket)
        self._broken = [*self._broken, *broken][:MOST_BROKEN]
        while len(self._buckets) * min(self.width, 2) > self._most:
            self._widen()

    def make_room(self, begin: int, last_step: int) -> None:
        """Widen the buckets to those of a curve that has every step from ``begin`` to ``last_step``."""
        while 2 * (last_step // self.width - begin // self.width + 1) > self._most:
            self._widen()

    def columns(self, begin: int | None = None, end: int | None = None) -> CurveColumns:
        """Return what is sent of the curve, or of its buckets between two steps."""
        told = CurveColumns(
            self.width, self._points, self.last_step, [], [], [], [], [], self._broken, self._broken_points
        )
        for bucket in self._buckets:
            for point, is_last in _shown(bucket):
                if (begin is not None and point.step < begin) or (end is not None and point.step > end):
                    continue
                told.step.append(point.step)
                told.at.append(round(point.at.timestamp(), 3))
                told.value.append(point.value)
                counts = is_last and bucket.count > 0
                told.mean.append(bucket.total / bucket.count if counts else None)
                told.count.append(bucket.count if counts else 0)
        return told

    def _widen(self) -> None:
        self.width *= 2
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:
            self._append(bucket)

    def _append(self, bucket: CurveBucket) -> None:
        if self._buckets and self._place(self._buckets[-1]) == self._place(bucket):
            _merge(self._buckets[-1], bucket)
        else:
            self._buckets.append(bucket)

    def _place(self, bucket: CurveBucket) -> int:
        return bucket.first.step // self.width


def _bucket_of(point: CurvePoint) -> CurveBucket:
    place = None if point.value is None else point
    return CurveBucket(
        point, point.step, place, place, point.value or 0.0, int(place is not None), 1, int(point.is_broken)
    )


def _merge(one: CurveBucket, later: CurveBucket) -> None:
    """Add the steps of the next bucket."""
    one.low = _further(one.low, later.low, lt)
    one.high = _further(one.high, later.high, gt)
    one.last_step = later.last_step
    one.total += later.total
    one.count += later.count
    one.points += later.points
    one.broken += later.broken


def _further(
    one: CurvePoint | None, other: CurvePoint | None, is_further: Callable[[float, float], bool]
) -> CurvePoint | None:
    """Return the point whose value is further; of equal ones the first, of one without a value the other."""
    if one is None or one.value is None:
        return other
    if other is None or other.value is None:
        return one
    return other if is_further(other.value, one.value) else one


def _shown(bucket: CurveBucket) -> list[tuple[CurvePoint, bool]]:
    """Return the points of the least and the greatest value in order, or the first point without a value; the last is marked."""
    if bucket.low is None or bucket.high is None:
        return [(bucket.first, True)]
    if bucket.low.step == bucket.high.step:
        return [(bucket.low, True)]
    first, last = sorted((bucket.low, bucket.high), key=lambda point: point.step)
    return [(first, False), (last, True)]
