"""Base models take turns at announcements: no tenant's placements that nobody claims hide another's."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from contracts.ids import SessionId, TenantId
from contracts.operations import LoraSettings
from store.tables import Placement
from tenants.placements import MOST_RUNS, due_placements, mark_announced
from tenants.runs import NewRun
from testing.runs import create_run
from tests.workers.housekeeping.conftest import House
from workers.cluster import placements
from workers.cluster.placements import PlacementAnnouncer

BEYOND = 5


async def place(house: House, tenant: TenantId, session: SessionId, base_model: str, *, count: int) -> list[str]:
    """Make runs that wait for a trainer, the first of them for the longest time."""
    async with house.database.write() as transaction:
        new = [NewRun(session, number, base_model, LoraSettings(4, seed=1), None) for number in range(1, count + 1)]
        runs = [await create_run(transaction, tenant, one, house.clock) for one in new]
        rows = []
        for run in runs:
            house.now += timedelta(milliseconds=1)
            rows.append({"run_id": run, "tenant_id": tenant, "base_model": base_model, "created_at": house.now})
        await transaction.execute(insert(Placement), rows)
    return list(runs)


async def test_unclaimed_placements_of_one_base_model_do_not_hide_anothers(
    either_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One base model has more placements than a look reads, and no trainer. The other's are announced at every look."""
    house, sent = either_house, list[str]()
    monkeypatch.setattr(placements, "send_placement", lambda _celery, base_model: sent.append(base_model))
    cats, of_cats, _ = await house.run("cats")
    dogs, of_dogs, _ = await house.run("dogs")
    await place(house, cats, of_cats, "nobody-trains-it", count=MOST_RUNS + BEYOND)
    await place(house, dogs, of_dogs, "base", count=1)
    celery: Any = None
    announcer = PlacementAnnouncer(celery, house.runtime)
    for _ in range(3):
        assert await announcer.announce() == 2
        assert sorted(sent) == ["base", "nobody-trains-it"]
        sent.clear()
        house.now += timedelta(seconds=6)


async def test_the_placements_never_announced_come_before_those_announced_longest_ago(either_house: House) -> None:
    house = either_house
    cats, of_cats, _ = await house.run("cats")
    dogs, of_dogs, _ = await house.run("dogs")
    flood = await place(house, cats, of_cats, "base", count=MOST_RUNS + BEYOND)
    (theirs,) = await place(house, dogs, of_dogs, "base", count=1)

    async def announced() -> list[str]:
        async with house.database.write() as transaction:
            due = await due_placements(transaction, announced_before=house.now - timedelta(seconds=5))
            found = [one.run_id for one in due]
            await mark_announced(transaction, found, house.now)
        house.now += timedelta(seconds=6)
        return found

    assert await announced() == flood[:MOST_RUNS]
    assert await announced() == [*flood[MOST_RUNS:], theirs, *flood[: MOST_RUNS - BEYOND - 1]]
