"""Curves of runs as the database reads them: step by step, or many steps as buckets with the least and greatest value of each.

A bucket is made by the database, so a long curve costs rows of the database and no object a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, cast

from sqlalchemy import CTE, ColumnElement, Float, Table, and_, case, false, func, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import RunMetric, RunPoint

MOST_CURVE_POINTS = 2000
"""Most steps of a curve that are told one by one."""
_LARGEST_SUMMAND = 1e290
"""Greatest value that counts in a mean: PostgreSQL refuses a sum that is no number."""
_SMALLEST_SUM = 1e-200
"""Sum below which a mean is 0: PostgreSQL refuses a quotient that becomes 0."""
_points = cast(Table, RunPoint.__table__).c
_metrics = cast(Table, RunMetric.__table__).c


class Series(StrEnum):
    """Number of a point that makes a curve."""

    MEAN_LOSS = "mean_loss"
    LEARNING_RATE = "learning_rate"
    GRAD_NORM = "grad_norm"
    TOKENS = "tokens"
    SAMPLING_KL = "sampling_kl"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A step's value. ``value`` None: there is none, or, if ``is_broken``, one that is not finite."""

    step: int
    at: datetime
    value: float | None
    is_broken: bool = False


@dataclass(slots=True)
class CurveBucket:
    """Steps beside each other. ``low`` and ``high`` are None if none of them has a value.

    - ``first``: any of the steps, for the bucket's place. ``points``: number of the steps.
    - ``total`` and ``count``: sum and number of the values.
    - ``broken``: number of the steps whose value is not finite.
    """

    first: CurvePoint
    last_step: int
    low: CurvePoint | None
    high: CurvePoint | None
    total: float
    count: int
    points: int
    broken: int


@dataclass(frozen=True, slots=True)
class CurveRows:
    """Rows of one curve, and what its numbers are in them."""

    step: ColumnElement[int]
    at: ColumnElement[datetime]
    value: ColumnElement[float | None]
    is_broken: ColumnElement[bool]
    condition: ColumnElement[bool]

    def between(self, after: int, until: int | None) -> ColumnElement[bool]:
        """Return the condition of the rows after a step, up to another one if it is given."""
        wanted = and_(self.condition, self.step > after)
        return wanted if until is None else and_(wanted, self.step <= until)


def rows_of_series(run: str, series: Series) -> CurveRows:
    """Return the rows of a run's series: its ended steps."""
    value, is_broken = _values()[series]
    condition = and_(_points.run_id == run, _points.at.is_not(None))
    return CurveRows(_points.step, _points.at, value, is_broken, condition)


def rows_of_metric(run: str, name: str) -> CurveRows:
    """Return the rows of a user's own metric."""
    condition = and_(_metrics.run_id == run, _metrics.name == name)
    return CurveRows(_metrics.step, _metrics.at, _metrics.value, _metrics.value.is_(None), condition)


async def curve_points(
    session: AsyncSession, rows: CurveRows, after: int, until: int | None, *, most: int
) -> list[CurvePoint]:
    """Return the curve after a step, up to another one if it is given: its first ``most`` points, in order."""
    found = await session.execute(
        select(rows.step, rows.at, rows.value, rows.is_broken)
        .where(rows.between(after, until))
        .order_by(rows.step)
        .limit(most)
    )
    return [CurvePoint(step, at, value, bool(is_broken)) for step, at, value, is_broken in found]


async def last_step(session: AsyncSession, rows: CurveRows, after: int, until: int | None) -> int | None:
    """Return the curve's last step after a step, up to another one if it is given; None without one."""
    last: int | None = await session.scalar(select(func.max(rows.step)).where(rows.between(after, until)))
    return last


async def step_after(session: AsyncSession, rows: CurveRows, after: int, until: int, *, count: int) -> int:
    """Return the step that is ``count`` steps of the curve after ``after``, at most ``until``."""
    steps = select(rows.step).where(rows.between(after, until)).order_by(rows.step)
    found: int | None = await session.scalar(steps.offset(count - 1).limit(1))
    return until if found is None else found


async def broken_steps(session: AsyncSession, rows: CurveRows, after: int, until: int, *, most: int) -> list[int]:
    """Return the first steps between two whose value is not finite."""
    wanted = select(rows.step).where(rows.between(after, until), rows.is_broken).order_by(rows.step).limit(most)
    return list(await session.scalars(wanted))


async def curve_buckets(
    session: AsyncSession, rows: CurveRows, after: int, until: int, *, width: int
) -> list[CurveBucket]:
    """Return the curve's steps after ``after`` up to ``until`` in buckets of ``width`` steps, in order."""
    bucket = (rows.step // width).label("bucket")
    each = select(
        bucket,
        rows.step.label("step"),
        rows.at.label("at"),
        rows.value.label("value"),
        rows.is_broken.label("is_broken"),
    ).where(rows.between(after, until))
    found = await session.execute(_bucket_query(each.cte("each")))
    return [_bucket(row) for row in found]


def _bucket_query(each: CTE) -> Any:
    """Return the query of the buckets. Places by value come from windows: a join would be planned without knowing the rows."""
    one = each.c
    empty_last = one.value.is_(None)
    ranked = select(
        each,
        func.row_number().over(partition_by=one.bucket, order_by=(empty_last, one.value, one.step)).label("low"),
        func.row_number()
        .over(partition_by=one.bucket, order_by=(empty_last, one.value.desc(), one.step))
        .label("high"),
    ).cte("ranked")
    row = ranked.c
    summand = case((func.abs(row.value) <= _LARGEST_SUMMAND, row.value))
    return (
        select(
            func.min(row.value).label("low"),
            func.max(row.value).label("high"),
            func.sum(summand).label("total"),
            func.count(summand).label("count"),
            func.count().label("points"),
            func.sum(case((row.is_broken, 1), else_=0)).label("broken"),
            func.max(row.step).label("last_step"),
            func.max(case((row.low == 1, row.step))).label("low_step"),
            func.max(case((row.low == 1, row.at))).label("low_at"),
            func.max(case((row.high == 1, row.step))).label("high_step"),
            func.max(case((row.high == 1, row.at))).label("high_at"),
        )
        .group_by(row.bucket)
        .order_by(row.bucket)
    )


def _bucket(row: Any) -> CurveBucket:
    first = CurvePoint(row.low_step, row.low_at, row.low, row.low is None and row.broken > 0)
    has_values = row.low is not None
    high = CurvePoint(row.high_step, row.high_at, row.high)
    return CurveBucket(
        first=first,
        last_step=row.last_step,
        low=first if has_values else None,
        high=high if has_values else None,
        total=row.total or 0.0,
        count=row.count,
        points=row.points,
        broken=int(row.broken),
    )


def _values() -> dict[Series, Sequence[Any]]:
    """Return each series' number in a point, and the condition that it is not finite."""
    loss, kl = _points.loss_sum, _points.sampling_kl_sum
    return {
        Series.MEAN_LOSS: (
            _mean(loss, _points.loss_weight),
            and_(loss.is_(None), _points.loss_weight != 0.0),
        ),
        Series.LEARNING_RATE: (_points.learning_rate, false()),
        Series.GRAD_NORM: (_points.grad_norm, false()),
        Series.TOKENS: (sql_cast(_points.tokens, Float(53)), false()),
        Series.SAMPLING_KL: (
            _mean(kl, sql_cast(_points.sampled_tokens, Float(53))),
            and_(kl.is_(None), _points.sampled_tokens != 0),
        ),
    }


def _mean(total: ColumnElement[float | None], count: ColumnElement[float]) -> ColumnElement[float | None]:
    """Return the mean, NULL without a count."""
    return case((count == 0.0, None), (func.abs(total) < _SMALLEST_SUM, 0.0), else_=total / count)
