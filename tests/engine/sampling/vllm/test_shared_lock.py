"""The lock that many share or one has alone."""

import asyncio

import pytest

from engine.sampling.vllm.shared_lock import SharedLock


class Holder:
    """A task that holds the lock until ``release``."""

    def __init__(self, lock: SharedLock, *, exclusive: bool) -> None:
        self.has_it = False
        self._released = asyncio.Event()
        self.task = asyncio.create_task(self._hold(lock, exclusive))

    async def _hold(self, lock: SharedLock, exclusive: bool) -> None:
        async with lock.exclusive() if exclusive else lock.shared():
            self.has_it = True
            await self._released.wait()
        self.has_it = False

    def release(self) -> None:
        self._released.set()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def holders(lock: SharedLock, kinds: str) -> list[Holder]:
    """``s`` shared, ``x`` exclusive, in this order."""
    made = []
    for kind in kinds:
        made.append(Holder(lock, exclusive=kind == "x"))
        await settle()
    return made


def having(made: list[Holder]) -> str:
    return "".join("1" if holder.has_it else "0" for holder in made)


async def test_first_come_first_served() -> None:
    made = await holders(SharedLock(), "ssxssxs")
    seen = [having(made)]
    for holder in made:
        holder.release()
        await settle()
        seen.append(having(made))
    assert seen == ["1100000", "0100000", "0010000", "0001100", "0000100", "0000010", "0000001", "0000000"]


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_who_gives_up_keeps_nobody_waiting(cancelled: int) -> None:
    made = await holders(SharedLock(), "sxs")
    made[cancelled].task.cancel()
    await settle()
    assert having(made) == {1: "101", 2: "100"}[cancelled]
    made[0].release()
    await settle()
    assert having(made) == {1: "001", 2: "010"}[cancelled]


async def test_given_and_given_up_at_once() -> None:
    """Cancelled between getting its turn and going on."""
    lock = SharedLock()
    made = await holders(lock, "xx")
    made[0].release()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    made[1].task.cancel()
    await settle()
    (after,) = await holders(lock, "x")
    assert after.has_it
    after.release()
    await settle()
