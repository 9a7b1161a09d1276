"""Points of runs' curves: one for each optimizer step, kept as long as the run's row, beyond the pruning of its results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, cast

from sqlalchemy import (
    Case,
    ColumnElement,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.losses import LOSS_RULES, LossName
from contracts.stored_words import known
from store.batcher import few_lengths
from store.tables import RunMetric, RunPoint

MOST_POINTS = 2000
"""Points that one query returns."""
MOST_PLACES = 16
"""Most places on curves from which one statement reads on."""
LARGEST_SUM = 1e250
"""Greatest sum of losses that is kept: PostgreSQL refuses a sum or a mean that is no number, and the transaction with it."""


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
    """Share of one transaction's operations in a point. The fields are the columns of ``RunPoint``.

    ``loss_fns``: those of its passes, each once, in their order.
    """

    run_id: str
    step: int
    tenant_id: TenantId
    at: datetime | None = None
    loss_sum: float | None = 0.0
    loss_weight: float = 0.0
    loss_per: LossPer = LossPer.NOTHING
    loss_fns: list[LossName] = field(default_factory=list)
    tokens: int = 0
    sampling_kl_sum: float | None = 0.0
    sampled_tokens: int = 0
    learning_rate: float | None = None
    grad_norm: float | None = None
    adapter_step: int | None = None

    def add_pass(self, loss_fn: LossName, metrics: Mapping[str, float]) -> None:
        """Add a ``forward_backward`` with this loss function and these metrics."""
        tokens, sampled = metrics.get("tokens:sum", 0.0), metrics.get("sampled_tokens:sum", 0.0)
        if "weights:sum" in metrics:
            weight, per = metrics["weights:sum"], LossPer.WEIGHT
        elif LOSS_RULES[loss_fn].is_policy:
            weight, per = sampled, LossPer.SAMPLED_TOKEN
        else:
            weight, per = tokens, LossPer.TOKEN
        self.loss_sum = _sum(self.loss_sum, metrics.get("loss:sum", math.nan))
        self.loss_weight += weight
        self.loss_per = per if self.loss_per in (LossPer.NOTHING, per) else LossPer.MIXED
        if loss_fn not in self.loss_fns:
            self.loss_fns.append(loss_fn)
        self.tokens += int(tokens)
        self.sampling_kl_sum = _sum(self.sampling_kl_sum, metrics.get("sampling_kl:mean", 0.0) * sampled)
        self.sampled_tokens += int(sampled)

    def end(self, at: datetime, learning_rate: float, metrics: Mapping[str, float]) -> None:
        """Add the optimizer step, which ends the point."""
        self.at, self.learning_rate = at, _sum(0.0, learning_rate)
        self.grad_norm = _sum(0.0, metrics.get("grad_norm:max", math.nan))
        count = metrics.get("step:max")
        self.adapter_step = None if count is None else int(count)

    def rows(self) -> list[dict[str, Any]]:
        """Return the part as rows for the insert, which adds one loss function a row: sums are in the first alone."""
        first = self.loss_fns[0] if self.loss_fns else ""
        more = [PointPart(self.run_id, self.step, self.tenant_id).row(name) for name in self.loss_fns[1:]]
        return [self.row(first), *more]

    def row(self, loss_fn: str) -> dict[str, Any]:
        """Return the row of everything but the loss functions, of which it has this one."""
        return {name: getattr(self, name) for name in _PART_NAMES} | {"loss_fns": loss_fn}


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
    loss_fns: list[str]
    """Loss functions of the passes, each once, in the order in which they came; empty if an earlier version made the point."""
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
    rows = [row for part in ordered for row in part.rows()]
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
        loss_fns=row.loss_fns.split(",") if row.loss_fns else [],
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
    counts = ("loss_weight", "tokens", "sampled_tokens")
    last = ("at", "learning_rate", "grad_norm", "adapter_step")
    # Only a part with passes says what the loss is divided by.
    per = case(
        (or_(there.loss_per == LossPer.NOTHING, there.loss_per == new.loss_per), new.loss_per),
        (new.loss_per == LossPer.NOTHING, there.loss_per),
        else_=LossPer.MIXED,
    )
    return insert.on_conflict_do_update(
        index_elements=[there.run_id, there.step],
        set_={name: there[name] + new[name] for name in counts}
        | {name: _finite_sum(there[name], new[name]) for name in ("loss_sum", "sampling_kl_sum")}
        | {name: func.coalesce(new[name], there[name]) for name in last}
        | {"loss_per": per, "loss_fns": _with_name(there.loss_fns, new.loss_fns)},
    )


def _with_name(names: ColumnElement[str], name: ColumnElement[str]) -> Case[str]:
    """Return the names with another, unless it is among them already. Either may be empty."""
    listed = literal(",").concat(names).concat(",")
    is_there = func.replace(listed, literal(",").concat(name).concat(","), "") != listed
    return case((or_(name == "", is_there), names), (names == "", name), else_=names.concat(",").concat(name))


def _finite_sum(first: ColumnElement[Any], second: ColumnElement[Any]) -> Case[Any]:
    """Return the sum, NULL for a summand that ``_sum`` would not return: of two others it is finite."""
    are_kept = and_(func.abs(first) <= LARGEST_SUM, func.abs(second) <= LARGEST_SUM)
    return case((are_kept, first + second))


def _sum(first: float | None, second: float) -> float | None:
    """Return the sum; None for one beyond ``LARGEST_SUM`` or not finite, which no later summand makes finite again."""
    return None if first is None or not abs(first + second) <= LARGEST_SUM else first + second


def _ratio(total: float | None, count: float) -> float | None:
    return None if total is None or not count else total / count
