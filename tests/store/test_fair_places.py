"""Places are taken in turns: one tenant's many requests wait for each other, and others pass them."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from sqlalchemy import text

from store.database import Database, create_engine
from store.fair_places import FairPlaces, ask_for


class Desk:
    """Tasks that hold a place until they are told to leave, and the order in which they came to it."""

    def __init__(self, places: FairPlaces) -> None:
        self.places = places
        self.came: list[str] = []
        self.leaving: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(self, owner: str | None, *names: str) -> None:
        """Begin a task for each name, which asks for a place in the owner's turns."""
        for name in names:
            self.leaving[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(owner, name))
        await self._settle()

    async def leave(self, name: str) -> None:
        self.leaving[name].set()
        await self._settle()

    async def _hold(self, owner: str | None, name: str) -> None:
        if owner is not None:
            ask_for(owner)
        async with self.places.place():
            self.came.append(name)
            await self.leaving[name].wait()

    @staticmethod
    async def _settle() -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest_asyncio.fixture
async def desk_of() -> AsyncIterator[Callable[[FairPlaces], Desk]]:
    made: list[Desk] = []

    def make(places: FairPlaces) -> Desk:
        made.append(Desk(places))
        return made[-1]

    yield make
    tasks = [task for desk in made for task in desk.tasks.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_tenants_take_turns_however_many_requests_one_has(desk_of: Callable[[FairPlaces], Desk]) -> None:
    desk = desk_of(FairPlaces(1, each=1))
    await desk.send("cats", "c1", "c2", "c3", "c4")
    await desk.send("dogs", "d1", "d2")
    await desk.send("emus", "e1")
    for name in ("c1", "c2", "d1", "e1", "c3", "d2"):
        assert desk.came[-1] == name
        await desk.leave(name)
    assert desk.came[-1] == "c4"


async def test_the_services_own_work_takes_every_second_turn(desk_of: Callable[[FairPlaces], Desk]) -> None:
    desk = desk_of(FairPlaces(1, each=1))
    await desk.send("cats", "c1", "c2", "c3")
    await desk.send(None, "own1", "own2", "own3")
    for name in ("c1", "own1", "c2", "own2", "c3", "own3"):
        assert desk.came[-1] == name
        await desk.leave(name)


async def test_one_tenant_never_has_all_places(desk_of: Callable[[FairPlaces], Desk]) -> None:
    desk = desk_of(FairPlaces(4, each=2))
    await desk.send("cats", "c1", "c2", "c3")
    assert desk.came == ["c1", "c2"]
    await desk.send("dogs", "d1")
    await desk.send(None, "own1")
    assert desk.came == ["c1", "c2", "d1", "own1"]
    await desk.leave("d1")
    assert desk.places.waiting == 1, "the tenant has as many as it may"
    await desk.leave("c2")
    assert desk.came[-1] == "c3"


async def test_a_task_that_gives_up_leaves_its_turn_to_others(desk_of: Callable[[FairPlaces], Desk]) -> None:
    desk = desk_of(FairPlaces(1, each=1))
    await desk.send("cats", "c1", "c2")
    await desk.send("dogs", "d1")
    desk.tasks["c2"].cancel()
    # It is given the place and cancelled before it runs again.
    desk.leaving["c1"].set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await desk.leave("c1")
    assert desk.came == ["c1", "d1"]
    await desk.leave("d1")
    await desk.send("emus", "e1")
    assert desk.came == ["c1", "d1", "e1"]
    with pytest.raises(TimeoutError):
        async with desk.places.place(patience=0.01):
            pass
    await desk.leave("e1")
    async with desk.places.place(patience=0):
        pass


async def test_tasks_that_gave_up_cost_their_owner_no_turn(desk_of: Callable[[FairPlaces], Desk]) -> None:
    """A tenant whose clients disconnect at once is not overtaken by others for each of them."""
    places = FairPlaces(1, each=1)
    desk = desk_of(places)
    await desk.send("other", "holder")
    await desk.send("cats", "gone-0", "gone-1", "gone-2", "cat")
    await desk.send("dogs", "dog-0", "dog-1", "dog-2")
    for name in ("gone-0", "gone-1", "gone-2"):
        desk.tasks[name].cancel()
    await asyncio.wait([desk.tasks[name] for name in ("gone-0", "gone-1", "gone-2")], timeout=60)
    assert places.waiting == 4
    await desk.leave("holder")
    assert desk.came == ["holder", "cat"]
    await desk.leave("cat")
    assert desk.came[-1] == "dog-0"


async def test_one_tenants_transactions_leave_connections_of_the_pool_to_others(postgres_url: str) -> None:
    database, begun, over = Database(create_engine(postgres_url, pool_size=2)), asyncio.Event(), asyncio.Event()

    async def cats() -> None:
        ask_for("cats")
        async with database.write() as transaction:
            await transaction.execute(text("SELECT 1"))
            begun.set()
            await over.wait()

    held = [asyncio.create_task(cats()) for _ in range(4)]
    try:
        async with asyncio.timeout(30):
            await begun.wait()
            ask_for("dogs")
            async with database.write() as transaction:
                await transaction.execute(text("SELECT 1"))
                assert not any(task.done() for task in held)
            over.set()
            await asyncio.gather(*held)
    finally:
        await database.close()


async def test_surveys_of_many_tenants_leave_connections_of_the_pool_to_others(postgres_url: str) -> None:
    """One survey of each tenant, and a fourth of the pool for them all."""
    database, over = Database(create_engine(postgres_url, pool_size=8)), asyncio.Event()
    begun, both = list[str](), asyncio.Event()

    async def survey(owner: str) -> None:
        ask_for(owner)
        async with database.survey() as session:
            await session.execute(text("SELECT 1"))
            begun.append(owner)
            if len(begun) == 2:
                both.set()
            await over.wait()

    held = [asyncio.create_task(survey(owner)) for owner in ("cats", "cats", "cows", "hens", "pigs")]
    try:
        async with asyncio.timeout(60):
            await both.wait()
            for _ in range(20):
                ask_for("dogs")
                async with database.write() as transaction:
                    await transaction.execute(text("SELECT 1"))
            assert sorted(begun) == ["cats", "cows"]
            over.set()
            await asyncio.gather(*held)
            assert sorted(begun) == ["cats", "cats", "cows", "hens", "pigs"]
    finally:
        await database.close()
