"""Each step of housekeeping works by itself, in short transactions, for a bounded time."""

from datetime import timedelta

import pytest
from sqlalchemy import delete, text

from contracts.errors import Unavailable
from store.tables import Checkpoint, DownloadLink, VersionCommand
from tests.workers.housekeeping.conftest import House
from workers.housekeeping import housekeeping
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.records import read_records
from workers.housekeeping.schedule import StepName
from workers.housekeeping.step import LARGE


async def _links(house: House, count: int) -> None:
    """Make links that have expired."""
    tenant, _, _ = await house.run("linked")
    then = house.now - timedelta(hours=2)
    rows = [
        {
            "secret_hash": f"{number:064x}",
            "tenant_id": tenant,
            "checkpoint_id": "c",
            "created_at": then,
            "expires_at": then,
        }
        for number in range(count)
    ]
    async with house.database.write() as transaction:
        await transaction.execute(DownloadLink.__table__.insert(), rows)  # type: ignore[attr-defined]


async def test_a_step_that_fails_stops_no_other_and_is_known_to_fail(house: House) -> None:
    tenant, _, run = await house.run("first")
    await house.checkpoint(tenant, run, "short", ttl=60)
    await _links(house, 3)
    async with house.database.write() as transaction:
        # The first statements of steps that ask who was there, and of the one that meters storage, fail while the table is away.
        await transaction.execute(text("ALTER TABLE service_presence RENAME TO away"))
    house.now += timedelta(seconds=61)
    outcomes = await house.keeping.sweep()
    failed = {step for step, outcome in outcomes.items() if isinstance(outcome, BaseException)}
    assert failed == {
        StepName.END_SESSIONS,
        StepName.CANCEL_SILENT_SAMPLES,
        StepName.CLOSE_GAPS,
        StepName.RETIRE_VERSIONS,
        StepName.PRUNE_RESULTS,
        StepName.METER_STORAGE,
    }
    assert await house.count(Checkpoint) == 0
    assert await house.count(DownloadLink) == 0
    async with house.database.read() as session:
        records = await read_records(session)
    assert all(record is not None for record in records.values())
    assert {step for step, record in records.items() if record and record.failing_since} == failed
    assert {step for step, record in records.items() if record and record.succeeded_at is None} == failed


async def test_a_run_takes_many_short_transactions(house: House) -> None:
    await _links(house, 2 * LARGE + 1)
    sizes: list[int] = []
    step = house.keeping._steps.by_name[StepName.EXPIRE_LINKS]
    while True:
        batch = await step.work(None)
        sizes.append(batch.handled)
        if batch.next is None:
            break
    assert sizes == [LARGE, LARGE, 1]


async def test_a_run_stops_when_its_time_is_over_and_the_next_one_goes_on(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "RUN_SECONDS", 0.0)
    await _links(house, LARGE + 1)
    record = await house.keeping.run_step(StepName.EXPIRE_LINKS)
    assert (record.handled, record.behind_since) == (LARGE, house.now)
    record = await house.keeping.run_step(StepName.EXPIRE_LINKS)
    assert (record.handled, record.behind_since) == (1, None)
    assert await house.count(DownloadLink) == 0


async def test_a_task_that_comes_twice_runs_its_step_once(house: House) -> None:
    async with house.database.write() as transaction:
        await transaction.execute(delete(VersionCommand))
    await house.keeping.run_if_due(StepName.EXPIRE_LINKS)
    await _links(house, 1)
    await house.keeping.run_if_due(StepName.EXPIRE_LINKS)
    assert await house.count(DownloadLink) == 1
    house.now += house.runtime.settings.housekeeping_interval
    await house.keeping.run_if_due(StepName.EXPIRE_LINKS)
    assert await house.count(DownloadLink) == 0


async def test_a_step_runs_though_a_clock_that_was_ahead_has_told_of_its_last_run(house: House) -> None:
    house.now += timedelta(days=30)
    await house.keeping.run_if_due(StepName.EXPIRE_LINKS)
    house.now -= timedelta(days=30)
    await _links(house, 1)
    await house.keeping.run_if_due(StepName.EXPIRE_LINKS)
    assert await house.count(DownloadLink) == 0


async def test_a_failure_reaches_whoever_runs_the_step(house: House) -> None:
    """A Celery task is retried, with a growing pause, only for a failure that it sees."""
    await house.database.close()

    class Away:
        """A database that does not answer."""

        has_one_service = True

        def read(self) -> object:
            raise Unavailable("the database does not answer")

    object.__setattr__(house.runtime, "database", Away())
    with pytest.raises(Unavailable):
        await Housekeeping(house.runtime, lambda: True).run_step(StepName.EXPIRE_LINKS)
