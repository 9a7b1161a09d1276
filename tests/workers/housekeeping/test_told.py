"""Housekeeping is told: in metrics of every process that reads the database, and to operators."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from cli.main import app
from telemetry.housekeeping import StepState
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.records import read_records
from workers.housekeeping.schedule import StepName


def _shown(house: House, metric: str, step: StepName) -> float | None:
    return house.runtime.telemetry.metrics.registry.get_sample_value(f"weft_housekeeping_{metric}", {"step": step})


async def test_metrics_tell_of_a_step_that_fails_and_of_one_that_stays_behind(house: House) -> None:
    await house.sweep()
    async with house.database.write() as transaction:
        await transaction.execute(text("ALTER TABLE download_links RENAME TO away"))
    for _ in range(2):
        house.now += timedelta(minutes=20)
        await house.keeping.sweep()
    async with house.database.read() as session:
        states = [
            StepState(step, one.seconds, one.succeeded_at, one.behind_since, one.failing_since)
            for step, one in (await read_records(session)).items()
            if one is not None
        ]
    house.runtime.telemetry.metrics.housekeeping_read(states)
    house.now += timedelta(minutes=1)
    assert _shown(house, "success_age_seconds", StepName.EXPIRE_LINKS) == 41 * 60
    assert _shown(house, "failing_seconds", StepName.EXPIRE_LINKS) == 21 * 60
    assert _shown(house, "success_age_seconds", StepName.OPEN_GATES) == 60
    assert _shown(house, "failing_seconds", StepName.OPEN_GATES) == 0
    house.runtime.telemetry.metrics.housekeeping_read(None)
    assert _shown(house, "success_age_seconds", StepName.OPEN_GATES) is None


async def test_an_operator_sees_when_each_step_last_succeeded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.keeping.run_step(StepName.OPEN_GATES)
    await house.database.close()
    monkeypatch.setenv("WEFT_DATA_DIR", str(house.folder.path(".")))
    shown = await asyncio.to_thread(CliRunner().invoke, app, ["housekeeping", "status"])
    assert shown.exit_code == 0, shown.output
    lines = dict(line.split("\t") for line in shown.output.splitlines())
    assert lines["open-gates"].startswith("success=2030-01-01 00:00:00 rows=0")
    assert lines["end-sessions"] == "never ran"
    assert set(lines) == set(StepName)
