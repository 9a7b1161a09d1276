"""Curves of very many points: what is sent and what is read for it is bounded, spikes stay, and both databases tell the same."""

import math
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert

from api.dashboard.curve_buckets import MOST_ENTRIES, CurveBuckets, CurveColumns
from api.dashboard.run_curves import MOST_RANGE, PIECE, RunCurves
from store.tables import RunMetric, RunPoint
from tenants.curves import CurvePoint, Series
from tenants.run_points import LARGEST_SUM, LossPer
from tests.tenants.conftest import books  # noqa: F401 - a fixture
from tests.tenants.usage_books import NOON

COUNT = 6 * PIECE + 77
SPIKE, DIP, GAP, BROKEN = 20_001, 30_003, 40_000, 41_234


def point(tenant: str, run: str, step: int, loss: float | None, weight: float = 8.0) -> dict[str, Any]:
    return {
        "run_id": run,
        "step": step,
        "tenant_id": tenant,
        "at": NOON + timedelta(seconds=step),
        "loss_sum": loss,
        "loss_weight": weight,
        "loss_per": LossPer.WEIGHT,
        "tokens": step,
        "sampling_kl_sum": 0.0,
        "sampled_tokens": 0,
        "learning_rate": 1e-4,
        "grad_norm": 1.0,
        "adapter_step": step,
    }


def losses(count: int) -> dict[int, float | None]:
    rnd = random.Random(7)
    made: dict[int, float | None] = {step: 8 * math.exp(-step / count) + rnd.random() for step in range(1, count + 1)}
    return made | {SPIKE: 4000.0, DIP: -4000.0, BROKEN: None}


async def store(database, table: type, rows: Sequence[dict[str, Any]]) -> None:
    for begin in range(0, len(rows), 5000):
        async with database.write() as transaction:
            await transaction.execute(insert(table), rows[begin : begin + 5000])


def expected(values: dict[int, float | None]) -> CurveColumns:
    """Return the curve as it is made of its points one by one."""
    buckets = CurveBuckets()
    buckets.add(
        CurvePoint(
            step,
            NOON + timedelta(seconds=step),
            None if loss is None or step == GAP else loss / 8.0,
            loss is None and step != GAP,
        )
        for step, loss in values.items()
    )
    return buckets.columns()


def same(told: CurveColumns, wanted: CurveColumns) -> None:
    assert (told.step, told.value, told.count, told.at) == (wanted.step, wanted.value, wanted.count, wanted.at)
    assert (told.width, told.points, told.last_step) == (wanted.width, wanted.points, wanted.last_step)
    assert (told.broken, told.broken_points) == (wanted.broken, wanted.broken_points)
    # Sums of floats depend on their order.
    assert told.mean == [None if one is None else pytest.approx(one, rel=1e-9) for one in wanted.mean]


async def test_a_long_curve_is_made_by_the_database_as_of_its_points(books) -> None:  # noqa: F811
    database, (cats, dogs) = books.database, books.tenants
    values = losses(COUNT)
    rows = [point(cats, "a", step, loss, 0.0 if step == GAP else 8.0) for step, loss in values.items()]
    await store(database, RunPoint, rows + [point(dogs, "b", step, 1e6) for step in range(1, 50)])
    curves = RunCurves(database)
    told = await curves.series("a", Series.MEAN_LOSS)
    same(told, expected(values))
    assert len(told.step) <= MOST_ENTRIES
    assert {SPIKE, DIP} <= set(told.step)
    assert told.broken == [BROKEN]
    begin, end = SPIKE - 5000, SPIKE + 5000
    part = await curves.range_of("a", Series.MEAN_LOSS, begin, end)
    same(part, expected({step: values[step] for step in range(begin, end + 1)}))
    assert part.width < told.width
    assert (await curves.series("a", Series.TOKENS)).value[-1] == float(COUNT)
    flat = await curves.series("a", Series.LEARNING_RATE)
    assert (set(flat.value), sum(flat.count)) == ({1e-4}, COUNT)
    assert set((await curves.series("a", Series.SAMPLING_KL)).value) == {None}
    assert (await curves.series("b", Series.MEAN_LOSS)).points == 49
    # What comes later is read on.
    await store(database, RunPoint, [point(cats, "a", COUNT + 1, 80.0)])
    grown = await curves.series("a", Series.MEAN_LOSS)
    assert (grown.last_step, grown.value[-1], grown.points) == (COUNT + 1, 10.0, COUNT + 1)


async def test_means_that_no_number_tells_are_no_error(books) -> None:  # noqa: F811
    """PostgreSQL refuses a quotient that becomes 0 or infinite."""
    database, (cats, dogs) = books.database, books.tenants
    tiny = point(cats, "a", 1, 5e-324) | {"sampling_kl_sum": -5e-324, "sampled_tokens": 8}
    huge = point(cats, "a", 2, 2 * LARGEST_SUM, 1e-45)
    await store(database, RunPoint, [tiny, huge, point(dogs, "b", 1, 16.0)])
    curves = RunCurves(database)
    assert (await curves.series("a", Series.MEAN_LOSS)).value == [0.0, pytest.approx(2e295)]
    assert (await curves.series("a", Series.SAMPLING_KL)).value == [0.0, None]
    assert (await curves.series("b", Series.MEAN_LOSS)).value == [2.0]


async def test_own_metrics_with_few_and_many_values_are_bounded_too(books) -> None:  # noqa: F811
    database, (cats, dogs) = books.database, books.tenants

    def value(name: str, step: int, number: float | None, tenant: str = cats, run: str = "a") -> dict[str, Any]:
        return {"run_id": run, "name": name, "step": step, "tenant_id": tenant, "value": number, "at": NOON}

    many = [value("reward", 1000 * step, 1e308 if step % 2 else None) for step in range(5000)]
    few = [value("few", 1000 * step, float(step)) for step in range(40)]
    await store(database, RunMetric, many + few + [value("reward", 3, 7.0, dogs, "b")])
    curves = RunCurves(database)
    told = await curves.metric("a", "reward")
    assert 0 < len(told.step) <= MOST_ENTRIES
    assert (told.points, told.broken_points, set(told.value)) == (5000, 2500, {1e308})
    assert (await curves.metric("a", "few")).step == [1000 * step for step in range(40)]
    assert (await curves.metric("a", "few", 10_000, 12_000)).value == [10.0, 11.0, 12.0]
    assert (await curves.metric("b", "reward")).value == [7.0]


async def test_a_part_of_a_curve_costs_rows_of_the_database_and_never_more_than_so_many(books) -> None:  # noqa: F811
    database, cats = books.database, books.tenants[0]
    await store(database, RunPoint, [point(cats, "a", step, 8.0) for step in range(1, COUNT + 1)])
    statements: list[str] = []
    curves = RunCurves(database)
    surveys = [] if database.surveys is None else [database.surveys.engine]
    for engine in (database.engine, *surveys):
        event.listen(engine.sync_engine, "before_cursor_execute", lambda *told: statements.append(told[2]))
    await curves.range_of("a", Series.MEAN_LOSS, 1, COUNT)
    # The first points, more of them, their last step, and two statements for each piece.
    asked = [one for one in statements if one.startswith(("SELECT", "WITH"))]
    assert len(asked) == 3 + 2 * math.ceil(COUNT / PIECE)
    await curves.series("a", Series.MEAN_LOSS)
    statements.clear()
    cut = await curves.range_of("a", Series.MEAN_LOSS, 2000, 2000 + MOST_RANGE)
    assert len(statements) == 1, "a longer part is cut out of the kept curve"
    assert (cut.step[0] >= 2000, cut.last_step) == (True, COUNT)
