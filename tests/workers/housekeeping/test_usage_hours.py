"""Storage is metered once an hour for each tenant and project, and hours without a process are filled."""

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise

from sqlalchemy import delete, insert, select, update

from store.tables import Project, ServicePresence, Session, StorageHour, UsageHour
from tenants.storage_hours import StorageWalk, begin_walk, meter_storage, storage_lines
from tests.workers.housekeeping.conftest import House

HOUR = timedelta(hours=1)
SIZE = 7


async def _metered(house: House) -> dict[tuple[str, str], list[tuple[datetime, int]]]:
    """Hours and bytes of each tenant and project."""
    found: dict[tuple[str, str], list[tuple[datetime, int]]] = {}
    async with house.database.read() as session:
        for row in await session.scalars(select(StorageHour).order_by(StorageHour.hour)):
            found.setdefault((row.tenant_id, row.project), []).append((row.hour, row.nbytes))
    return found


async def _everybody_beats(house: House) -> None:
    async with house.database.write() as transaction:
        await transaction.execute(update(Session).values(last_seen_at=house.now))


async def test_each_hour_of_storage_is_recorded_once_and_missed_hours_are_filled(either_house: House) -> None:
    house = either_house
    house.now = house.now.replace(minute=10)
    begin = house.now.replace(minute=0)
    cats, cats_session, run = await house.run("cats")
    dogs, _, other_run = await house.run("dogs")
    async with house.database.write() as transaction:
        await transaction.execute(
            insert(ServicePresence), [{"number": 1, "present_at": house.now, "back_at": house.now}]
        )
    await house.checkpoint(cats, run, "first")
    for _ in range(2):
        await house.sweep()
    assert {key: [hour for hour, _ in rows] for key, rows in (await _metered(house)).items()} == {
        (cats, cats): [begin - HOUR]
    }
    async with house.database.write() as transaction:
        await transaction.execute(
            insert(Project), [{"id": "p-1", "tenant_id": cats, "name": "one", "created_at": house.now}]
        )
        await transaction.execute(update(Session).where(Session.id == cats_session).values(project="p-1"))
    await house.checkpoint(dogs, other_run, "theirs")
    house.now += 3 * HOUR
    await _everybody_beats(house)
    await house.sweep()
    found = await _metered(house)
    assert [hour for hour, _ in found[cats, cats]] == [begin - HOUR]
    assert [hour for hour, _ in found[cats, "p-1"]] == [begin, begin + HOUR, begin + 2 * HOUR]
    assert [hour for hour, _ in found[dogs, dogs]] == [begin, begin + HOUR, begin + 2 * HOUR]
    async with house.database.read() as session:
        lines = await storage_lines(session, cats, since=begin, before=begin + HOUR, limit=10)
    assert [(line.hour, line.project) for line in lines] == [(begin, "p-1")]


async def test_a_walk_in_pieces_meters_every_tenant_in_the_same_hours(either_house: House) -> None:
    house = either_house
    tenants = []
    for number in range(5):
        tenant, _, run = await house.run(f"tenant{number}")
        await house.checkpoint(tenant, run, "kept")
        tenants.append(tenant)
    async with house.database.write() as transaction:
        await transaction.execute(
            insert(ServicePresence), [{"number": 1, "present_at": house.now, "back_at": house.now}]
        )
        walk = await begin_walk(transaction, house.now)
    pieces = 0
    while walk is not None:
        async with house.database.write() as transaction:
            _, walk = await meter_storage(transaction, walk, most=2)  # type: ignore[assignment]
        pieces += 1
    assert pieces == 3
    found = await _metered(house)
    assert {tenant for tenant, _ in found} == set(tenants)
    assert len({tuple(hour for hour, _ in rows) for rows in found.values()}) == 1
    async with house.database.read() as session:
        again = await begin_walk(session, house.now)
    assert again.first == again.end, "nothing is left to meter"


async def test_an_hour_that_is_read_again_after_a_session_moved_is_counted_once(either_house: House) -> None:
    """A process records a page and ends before its place is kept; another tenant's hours are recorded by the second walk."""
    house = either_house
    (cats, session, run), (dogs, _, other_run) = await house.run("cats"), await house.run("dogs")
    for tenant, of in ((cats, run), (dogs, other_run)):
        await house.checkpoint(tenant, of, "kept")
    async with house.database.write() as transaction:
        await transaction.execute(
            insert(ServicePresence), [{"number": 1, "present_at": house.now, "back_at": house.now}]
        )
        await transaction.execute(
            insert(Project), [{"id": "p-1", "tenant_id": cats, "name": "one", "created_at": house.now}]
        )
        walk = await begin_walk(transaction, house.now)
        await meter_storage(transaction, replace(walk, after=max(one for one in ("", dogs) if one < cats)), most=1)
        await transaction.execute(update(Session).where(Session.id == session).values(project="p-1"))
    async with house.database.write() as transaction:
        assert (await meter_storage(transaction, walk, most=20))[1] is None
    found = await _metered(house)
    assert {key: len(rows) for key, rows in found.items()} == {(cats, cats): 1, (dogs, dogs): 1}
    async with house.database.write() as transaction:
        await transaction.execute(delete(StorageHour))
        assert await meter_storage(transaction, walk, most=20) == (0, None), "another walk has come to its end"
    assert await _metered(house) == {}


async def test_missed_hours_are_filled_in_transactions_of_bounded_rows(either_house: House) -> None:
    house = either_house
    tenants = []
    for name in ("cats", "dogs", "owls"):
        tenant, _, run = await house.run(name)
        await house.checkpoint(tenant, run, "kept")
        tenants.append(tenant)
    begin = house.now.replace(minute=0, second=0, microsecond=0) - 5 * HOUR
    beats = {"number": 1, "present_at": house.now, "back_at": house.now, "storage_metered_to": begin}
    async with house.database.write() as transaction:
        await transaction.execute(insert(ServicePresence), [beats])
        walk = await begin_walk(transaction, house.now)
    counts = [0]
    while walk is not None:
        async with house.database.write() as transaction:
            _, walk = await meter_storage(transaction, walk, most=2, most_rows=3)  # type: ignore[assignment]
            walk = walk and StorageWalk.parse(str(walk))  # type: ignore[assignment]
        counts.append(sum(len(rows) for rows in (await _metered(house)).values()))
    assert max(after - before for before, after in pairwise(counts)) == 3
    hours = [begin + number * HOUR for number in range(5)]
    found = {key: [hour for hour, _ in rows] for key, rows in (await _metered(house)).items()}
    assert found == {(tenant, tenant): hours for tenant in tenants}


async def test_old_hours_go_and_young_ones_stay(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("cats")
    old, young = house.now - timedelta(days=500), house.now - timedelta(days=399)
    keys = {"tenant_id": tenant, "session_id": session, "run_id": run, "key_id": 0, "base_model": "b", "kind": "sample"}
    sums = dict.fromkeys(
        ("operations", "failed", "train_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens"), 1
    )
    async with house.database.write() as transaction:
        for hour in (old, young):
            await transaction.execute(insert(UsageHour), [keys | sums | {"hour": hour}])
            stored = {"tenant_id": tenant, "hour": hour, "project": "", "nbytes": 1, "checkpoints": 1}
            await transaction.execute(insert(StorageHour), [stored])
    await house.sweep()
    async with house.database.read() as reading:
        assert list(await reading.scalars(select(UsageHour.hour))) == [young]
        assert young in set(await reading.scalars(select(StorageHour.hour)))
        assert old not in set(await reading.scalars(select(StorageHour.hour)))
