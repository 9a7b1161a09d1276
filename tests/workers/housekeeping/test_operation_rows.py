"""Rows of operations: those of a model that stays open for months go, too."""

from datetime import timedelta
from typing import cast

import pytest
from sqlalchemy import Table, insert, select, update

from contracts.ids import RunId, TenantId
from contracts.operations import OperationKind
from ledger.pruning import REPEATABLE
from store.tables import Operation, Run
from tests.workers.housekeeping.conftest import House
from workers.housekeeping.schedule import StepName

OLD = 40
"""Operations of each run before the last that may be repeated."""


@pytest.fixture
async def place(either_house: House) -> House:
    return either_house


async def passed(house: House, tenant: TenantId, run: RunId, *, covered: int) -> None:
    """Give the run operations that were done and pruned, and whose effect a snapshot has up to ``covered``."""
    last = OLD + REPEATABLE
    row = {"tenant_id": tenant, "lane": run, "kind": OperationKind.OPTIM_STEP, "base_model": "base", "body_digest": b""}
    row |= {"state": "done", "created_at": house.now, "finished_at": house.now, "pruned_at": house.now}
    rows = [{**row, "id": f"{run[-44:-8]}{seq_id:08}"[-36:], "seq_id": seq_id} for seq_id in range(last)]
    standing = {"state": "ready", "next_seq_id": last, "snapshot_seq_id": covered, "payloads_dropped_to": covered}
    async with house.database.write() as transaction:
        await transaction.execute(insert(cast(Table, Operation.__table__)), rows)
        await transaction.execute(update(Run).where(Run.id == run).values(standing))


async def seq_ids(house: House, run: RunId) -> list[int]:
    async with house.database.read() as session:
        rows = select(Operation.seq_id).where(Operation.lane == run).order_by(Operation.seq_id)
        return list(await session.scalars(rows))


async def forget(house: House) -> None:
    (outcome,) = (await house.keeping.sweep([StepName.FORGET_OPERATIONS], until_done=True)).values()
    assert not isinstance(outcome, BaseException), outcome


async def test_an_open_model_keeps_its_last_operations_its_first_and_what_a_replay_needs(place: House) -> None:
    cats, _, mine = await place.run("cats")
    dogs, _, theirs = await place.run("dogs")
    await passed(place, cats, mine, covered=OLD + REPEATABLE - 1)
    await passed(place, dogs, theirs, covered=9)
    await forget(place)
    assert len(await seq_ids(place, mine)) == OLD + REPEATABLE, "they are not old"
    place.now += place.runtime.settings.retention_operations + timedelta(minutes=1)
    await forget(place)
    assert await seq_ids(place, mine) == [0, *range(OLD, OLD + REPEATABLE)]
    assert await seq_ids(place, theirs) == [0, *range(10, OLD + REPEATABLE)]


async def test_a_lane_whose_done_operations_are_forgotten_stands_at_its_snapshot(place: House) -> None:
    """An adapter in memory that lacks what the snapshot has must not pass for the run's."""
    cats, _, mine = await place.run("cats")
    dogs, _, theirs = await place.run("dogs")
    for owner, run in ((cats, mine), (dogs, theirs)):
        await passed(place, owner, run, covered=OLD - 1)
    failed = update(Operation).where(Operation.lane == mine, Operation.seq_id >= OLD).values(state="failed")
    async with place.database.write() as transaction:
        await transaction.execute(failed)
    place.now += place.runtime.settings.retention_operations + timedelta(minutes=1)
    await forget(place)
    async with place.database.read() as session:
        stands = await place.runtime.ledger.lane_positions(session, [mine, theirs])
    last = OLD + REPEATABLE
    assert (stands[mine].next_seq_id, stands[mine].done_seq_id) == (last, OLD - 1)
    assert (stands[theirs].next_seq_id, stands[theirs].done_seq_id) == (last, last - 1)
