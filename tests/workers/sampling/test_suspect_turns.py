"""Turns of suspects: tenants take turns, and neither those with a last attempt nor the others wait for ever."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from workers.sampling.suspect_turns import SuspectTurns

MOST_ATTEMPTS = 3
LAST = MOST_ATTEMPTS - 1
STEPS = 20


class Suspects:
    """Suspects of one process; ``drawn`` are those that have a turn now, in the order of their entries."""

    def __init__(self) -> None:
        self._turns = SuspectTurns(MOST_ATTEMPTS)
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.drawn: list[str] = []

    def send(self, name: str, attempts: int = 1) -> None:
        """Have a suspect wait for its turn; its tenant is the first word of ``name``."""
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._draw(name, attempts))

    async def _draw(self, name: str, attempts: int) -> None:
        async with self._turns.turn(attempts, name.split()[0]):
            self.drawn.append(name)
            await self._ends[name].wait()
            self.drawn.remove(name)

    async def settle(self) -> None:
        """Wait until nobody moves any more: turns wait for nothing but each other."""
        for _ in range(STEPS):
            await asyncio.sleep(0)

    async def end(self, *names: str) -> None:
        """End the drawing of these."""
        for name in names:
            self._ends[name].set()
        await self.settle()


@asynccontextmanager
async def suspects() -> AsyncIterator[Suspects]:
    made = Suspects()
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_a_tenants_suspect_waits_for_no_more_than_one_of_anothers_hundreds() -> None:
    async with suspects() as some:
        for number in range(300):
            some.send(f"flood {number}")
        await some.settle()
        flood = len(some.drawn)
        assert 8 <= flood <= 16
        some.send("cat 0")
        some.send("cat 1")
        await some.settle()
        await some.end(some.drawn[0], some.drawn[1])
        assert {"cat 0", "cat 1"} <= set(some.drawn)
        assert len(some.drawn) <= 16


async def test_tenants_take_turns_at_drawing_alone() -> None:
    async with suspects() as some:
        for number in range(5):
            some.send(f"flood {number}", LAST)
        await some.settle()
        some.send("cat 0", LAST)
        await some.settle()
        assert some.drawn == ["flood 0"]
        await some.end("flood 0")
        assert some.drawn == ["cat 0"]


async def test_after_a_suspect_with_a_last_attempt_the_others_that_wait_have_a_round() -> None:
    """After the round the next one with a last attempt is drawn, alone, before those that came meanwhile."""
    async with suspects() as some:
        for number in range(3):
            some.send(f"flood {number}", LAST)
        await some.settle()
        some.send("cat 0")
        some.send("dog 0")
        await some.settle()
        assert some.drawn == ["flood 0"]
        await some.end("flood 0")
        assert set(some.drawn) == {"cat 0", "dog 0"}
        some.send("cat 1")
        await some.settle()
        await some.end("cat 0")
        assert some.drawn == ["dog 0"]
        await some.end("dog 0")
        assert some.drawn == ["flood 1"]
        await some.end("flood 1")
        assert some.drawn == ["cat 1"]
        await some.end("cat 1")
        assert some.drawn == ["flood 2"]


async def test_a_suspect_that_is_cancelled_takes_no_turn_and_leaves_its_own() -> None:
    async with suspects() as some:
        for name in ("cat 0", "dog 0", "cat 1"):
            some.send(name, LAST)
        await some.settle()
        assert some.drawn == ["cat 0"]
        some.tasks["dog 0"].cancel()
        some.tasks["cat 0"].cancel()
        some.drawn.clear()
        await some.settle()
        assert some.drawn == ["cat 1"]
