"""Many values of metrics are recorded by few statements: a run is locked meanwhile, and SQLite waits for nothing else."""

import sqlite3
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event, func, select

from store.settings import Settings
from store.tables import Run, RunMetric
from tenants.run_metrics import MOST_NAMES, MOST_VALUES
from tests.api.conftest import Service, Tenant

STEPS = MOST_VALUES // MOST_NAMES
MOST_STATEMENTS = 8
"""Most statements of one request, its authentication left out."""


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Settings of either database."""
    if request.param == "sqlite":
        return settings
    return settings.model_copy(update={"database_url": request.getfixturevalue("migrated_postgres_url")})


async def add(tenant: Tenant, run: str, steps: range, value: float, names: int = MOST_NAMES) -> int:
    """Record a value of each of so many names at each step; return the status of the answer."""
    metrics = {f"{number}-'\"é": value for number in range(names)}
    body = {"points": [{"step": step, "metrics": metrics} for step in steps]}
    return (await tenant.http.post(f"{tenant.service.url}/api/weft/v1/runs/{run}/points", json=body)).status_code


async def kept(service: Service, run: str) -> tuple[int, int, float | None]:
    """Return how many values the run has by its own count, and by its rows, and their sum."""
    async with service.database.read() as session:
        rows = select(func.count(), func.sum(RunMetric.value)).where(RunMetric.run_id == run)
        counted = await session.scalar(select(Run.metric_rows).where(Run.id == run)) or 0
        count, total = (await session.execute(rows)).one()
    return counted, count, total


async def test_values_of_many_names_are_recorded_by_few_statements(cats: Tenant, dogs: Tenant) -> None:
    """New ones, those that are there and both at once are counted as they are; a neighbour's are others."""
    service, run, beside = cats.service, await cats.run(), await dogs.run()
    assert await add(dogs, beside, range(STEPS), 7.0, names=1) == 200
    sent: list[str] = []
    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *told: sent.append(told[2]))
    assert await add(cats, run, range(STEPS), 1.0) == 200
    assert len([one for one in sent if "api_keys" not in one]) <= MOST_STATEMENTS
    assert await kept(service, run) == (MOST_VALUES, MOST_VALUES, MOST_VALUES)
    assert await add(cats, run, range(STEPS), 2.0) == 200
    assert await kept(service, run) == (MOST_VALUES, MOST_VALUES, 2 * MOST_VALUES)
    assert await add(cats, run, range(STEPS // 2, STEPS // 2 + STEPS), 2.0) == 200
    more = MOST_VALUES + MOST_VALUES // 2
    assert await kept(service, run) == (more, more, 2 * more)
    assert await add(cats, run, range(2**53, 2**53 + 1), 2.0, names=3) == 200
    assert await add(cats, run, range(2**53, 2**53 + 1), 2.0, names=3) == 200
    assert (await kept(service, run))[:2] == (more + 3, more + 3)
    assert await add(dogs, run, range(1), 1.0) == 404
    assert await kept(service, beside) == (STEPS, STEPS, 7 * STEPS)


@pytest.mark.parametrize("settings", ["sqlite"], indirect=True)
async def test_the_values_of_a_request_are_looked_for_one_by_one_in_an_index(cats: Tenant, dogs: Tenant) -> None:
    """A walk over all values of the run takes SQLite minutes where the run has many."""
    service, run = cats.service, await cats.run()
    sent: list[tuple[str, Any]] = []
    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", lambda *told: sent.append((told[2], told[3])))
    assert await add(cats, run, range(1), 1.0) == 200
    ((statement, values),) = [one for one in sent if "json_each" in one[0]]
    with closing(sqlite3.connect(str(engine.url.database))) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
    steps = [step[-1] for step in plan if "run_metrics" in step[-1]]
    assert len(steps) == 1
    assert "run_id=? AND name=? AND step=?" in steps[0]
    assert await add(dogs, run, range(1), 1.0) == 404


async def test_values_are_kept_to_the_last_bit(cats: Tenant, dogs: Tenant) -> None:
    """A number that is not finite is kept as none, and a neighbour's run has nothing."""
    run, beside = await cats.run(), await dogs.run()
    values = [1 / 3, 5e-324, 1.7976931348623157e308, 2**53 + 1.0, 0.1 + 0.2, -1e-7, None]
    points = [{"step": step, "metrics": {"a": value}} for step, value in enumerate(values)]
    url = f"{cats.service.url}/api/weft/v1/runs/{run}/points"
    assert (await cats.http.post(url, json={"points": points})).status_code == 200
    async with cats.service.database.read() as session:
        rows = select(RunMetric.value, RunMetric.tenant_id).where(RunMetric.run_id == run).order_by(RunMetric.step)
        found = (await session.execute(rows)).all()
    assert [repr(value) for value, _ in found] == [repr(value) for value in values]
    assert {tenant for _, tenant in found} == {cats.id}
    assert (await kept(dogs.service, beside))[1] == 0
