"""Points of runs' curves: one for each optimizer step, kept as long as the run's row, beyond the pruning of its results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, cast

from sqlalchemy import Row, Select, Table, bindparam, case, delete, func, literal_column, or_, select, tuple_, union_all
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.stored_words import known
from store.batcher import few_lengths
from store.tables import RunMetric, RunPoint

MOST_POINTS = 2000
"""Points that one query returns."""
MOST_PLACES = 16
"""Most places on curves from which one statement reads on."""


class LossPer(StrEnum):
    """Denominator of a point's mean loss.

    - ``weight``: the sum of the weights of cross entropy. ``sampled_token``: the sampled tokens of a policy loss.
    - ``token``: all tokens, where neither is defined (negative weights, custom losses).
    - ``mixed``: the step's passes have different ones, and the mean compares with no other step's.
    - ``nothing``: no pass came before the step.
    """

    WEIGHT = "weight"
    SAMPLED_TOKEN = "sampled_token"
    TOKEN = "token"
    MIXED = "mixed"
    NOTHING = "nothing"


@dataclass(slots=True)
class PointPart:
    """Share of one transaction's operations in a point. The fields are the columns of ``RunPoint``."""

    run_id: str
    step: int
    tenant_id: TenantId
    at: datetime | None = None
    loss_sum: float | None = 0.0
    loss_weight: float = 0.0
    loss_per: LossPer = LossPer.NOTHING
    tokens: int = 0
    sampling_kl_sum: float | None = 0.0
    sampled_tokens: int = 0
    learning_rate: float | None = None
    grad_norm: float | None = None
    adapter_step: int | None = None

    def add_pass(self, metrics: Mapping[str, float]) -> None:
        """Add a ``forward_backward`` with these metrics."""
        tokens, sampled = metrics.get("tokens:sum", 0.0), metrics.get("sampled_tokens:sum", 0.0)
        if "weights:sum" in metrics:
            weight, per = metrics["weights:sum"], LossPer.WEIGHT
        elif sampled:
            weight, per = sampled, LossPer.SAMPLED_TOKEN
        else:
            weight, per = tokens, LossPer.TOKEN
        self.loss_sum = _sum(self.loss_sum, metrics.get("loss:sum", math.nan))
        self.loss_weight += weight
        self.loss_per = per if self.loss_per in (LossPer.NOTHING, per) else LossPer.MIXED
        self.tokens += int(tokens)
        self.sampling_kl_sum = _sum(self.sampling_kl_sum, metrics.get("sampling_kl:mean", 0.0) * sampled)
        self.sampled_tokens += int(sampled)

    def end(self, at: datetime, learning_rate: float, metrics: Mapping[str, float]) -> None:
        """Add the optimizer step, which ends the point."""
        self.at, self.learning_rate = at, _sum(0.0, learning_rate)
        self.grad_norm = _sum(0.0, metrics.get("grad_norm:max", math.nan))
        count = metrics.get("step:max")
        self.adapter_step = None if count is None else int(count)


_PART_NAMES = tuple(field.name for field in fields(PointPart))
_points = cast(Table, RunPoint.__table__)


@dataclass(frozen=True, slots=True)
class Point:
    """A run's optimizer step. Means are None where they are not defined or not finite."""

    step: int
    at: datetime
    mean_loss: float | None
    loss_sum: float | None
    loss_weight: float
    loss_per: LossPer
    tokens: int
    learning_rate: float | None
    grad_norm: float | None
    sampling_kl: float | None
    """Nats a sampled token, of the current weights from the weights that sampled the token."""
    sampled_tokens: int
    adapter_step: int | None


async def add_parts(transaction: AsyncSession, parts: Sequence[PointPart]) -> None:
    """Add the parts to the points. Sorted, so that two transactions lock the rows in the same order."""
    ordered = sorted(parts, key=lambda part: (part.run_id, part.step))
    rows = [{name: getattr(part, name) for name in _PART_NAMES} for part in ordered]
    await transaction.execute(_adding_insert(transaction.get_bind().dialect.name), rows)


async def points_after(session: AsyncSession, run: str, step: int, *, most: int) -> list[Point]:
    """Return at most ``most`` ended points of the run after ``step``, in order."""
    rows = await session.execute(_ended_points(run, step, min(most, MOST_POINTS)))
    return [_point(row) for row in rows]


async def points_of_many(session: AsyncSession, places: Sequence[tuple[str, int]]) -> list[list[Point]]:
    """Return for each run and step at most ``MOST_POINTS`` ended points after it, in order.

    ``MOST_PLACES`` of them are one statement.
    """
    found: list[list[Point]] = [[] for _ in places]
    for begin in range(0, len(places), MOST_PLACES):
        some = few_lengths(places[begin : begin + MOST_PLACES])
        asked: dict[str, Any] = {"most": MOST_POINTS}
        for number, (run, step) in enumerate(some):
            asked |= {f"run_{number}": run, f"step_{number}": step}
        for row in await session.execute(_AT_PLACES[len(some)], asked):
            if begin + row.place < len(found):
                found[begin + row.place].append(_point(row))
    return [sorted(points, key=lambda point: point.step) for points in found]


def _ended_points(run: Any, step: Any, most: Any) -> Select[Any]:
    return (
        select(_points)
        .where(_points.c.run_id == run, _points.c.step > step, _points.c.at.is_not(None))
        .order_by(_points.c.step)
        .limit(most)
    )


def _at_places(count: int) -> Select[Any]:
    """Return the statement of so many places, whose parameters are ``run_0``, ``step_0`` and so on, and ``most``."""
    numbered = []
    for number in range(count):
        one = _ended_points(bindparam(f"run_{number}"), bindparam(f"step_{number}"), bindparam("most")).subquery()
        numbered.append(select(literal_column(str(number)).label("place"), one))
    # A select of the union: the columns of a union itself are gathered anew for each result, which takes longer than the read.
    return select(union_all(*numbered).subquery())


_AT_PLACES = {count: _at_places(count) for count in (1, 2, 4, 8, MOST_PLACES)}


def _point(row: Row[Any]) -> Point:
    return Point(
        step=row.step,
        at=row.at,
        mean_loss=_ratio(row.loss_sum, row.loss_weight),
        loss_sum=row.loss_sum,
        loss_weight=row.loss_weight,
        loss_per=known(LossPer, row.loss_per, LossPer.MIXED),
        tokens=row.tokens,
        learning_rate=row.learning_rate,
        grad_norm=row.grad_norm,
        sampling_kl=_ratio(row.sampling_kl_sum, row.sampled_tokens),
        sampled_tokens=row.sampled_tokens,
        adapter_step=row.adapter_step,
    )


async def forget_points(transaction: AsyncSession, runs: Sequence[str], *, most: int) -> int:
    """Delete at most ``most`` points and as many metrics of ``runs``; return how many went."""
    gone = 0
    for table in (RunPoint, RunMetric):
        key = tuple_(*cast(Table, table.__table__).primary_key.columns)
        doomed = select(*cast(Table, table.__table__).primary_key.columns).where(table.run_id.in_(runs)).limit(most)
        found = await transaction.execute(
            delete(table).where(key.in_(doomed)).returning(table.step).execution_options(synchronize_session=False)
        )
        gone = max(gone, len(found.all()))
    return gone


@cache
def _adding_insert(dialect: str) -> SqliteInsert | PostgresInsert:
    """Return an insert that adds its row's sums to those of the row that is there."""
    insert = sqlite_insert(_points) if dialect == "sqlite" else postgres_insert(_points)
    there, new = _points.c, insert.excluded
    sums = ("loss_sum", "loss_weight", "tokens", "sampling_kl_sum", "sampled_tokens")
    last = ("at", "learning_rate", "grad_norm", "adapter_step")
    # Only a part with passes says what the loss is divided by.
    per = case(
        (or_(there.loss_per == LossPer.NOTHING, there.loss_per == new.loss_per), new.loss_per),
        (new.loss_per == LossPer.NOTHING, there.loss_per),
        else_=LossPer.MIXED,
    )
    return insert.on_conflict_do_update(
        index_elements=[there.run_id, there.step],
        set_={name: there[name] + new[name] for name in sums}
        | {name: func.coalesce(new[name], there[name]) for name in last}
        | {"loss_per": per},
    )


def _sum(first: float | None, second: float) -> float | None:
    """Return the sum; None for one that is not finite, which no later summand makes finite again."""
    return None if first is None or not math.isfinite(first + second) else first + second


def _ratio(total: float | None, count: float) -> float | None:
    return None if total is None or not count else total / count
