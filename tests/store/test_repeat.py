"""Periodic loops and waits: no wake-up is lost, a stop reaches every loop, a failure ends none."""

import asyncio
from time import monotonic

import pytest

from contracts.errors import Unavailable
from store.repeat import LONGEST_REST_SECONDS, repeat, wait_for, wait_for_any

DEADLINE = 60.0
NEVER = 3600.0


async def test_one_stop_ends_every_loop_that_waits_for_it() -> None:
    stopping, begun = asyncio.Event(), asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()

    async def waits() -> None:
        begun.release()
        await wait_for_any([stopping], NEVER)

    loops = [repeat(work, seconds=NEVER, stopping=stopping, failed="work") for _ in range(2)]
    async with asyncio.timeout(DEADLINE):
        tasks = [asyncio.create_task(loop) for loop in (*loops, waits())]
        for _ in tasks:
            await begun.acquire()
        stopping.set()
        await asyncio.gather(*tasks)


async def test_a_wake_up_during_the_work_is_followed_by_another_round() -> None:
    stopping, wake = asyncio.Event(), asyncio.Event()
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            wake.set()
        else:
            stopping.set()

    async with asyncio.timeout(DEADLINE):
        await repeat(work, seconds=NEVER, stopping=stopping, wake=wake, failed="work")
    assert rounds == 2


@pytest.mark.parametrize(
    ("failure", "has_traceback"), [(Unavailable("no database"), False), (TimeoutError(), False), (KeyError("x"), True)]
)
async def test_a_failure_is_told_and_the_loop_goes_on(
    failure: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = asyncio.Event()
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise failure
        stopping.set()

    async with asyncio.timeout(DEADLINE):
        await repeat(work, seconds=0.0, stopping=stopping, failed="the books could not be kept")
    (record,) = caplog.records
    assert record.getMessage().startswith("the books could not be kept")
    assert (record.exc_info is not None) == has_traceback


async def test_a_wait_says_whether_the_event_came() -> None:
    event = asyncio.Event()
    assert not await wait_for(event, 0.0)
    event.set()
    assert await wait_for(event, NEVER)
    assert not event.is_set()


async def test_very_many_wake_ups_take_a_part_of_the_time_and_one_after_a_pause_is_answered_at_once() -> None:
    stopping, wake, rounds, again = asyncio.Event(), asyncio.Event(), 0, asyncio.Event()
    took, rest, seconds = 0.01, 4.0, 0.6

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        again.set()
        await asyncio.sleep(took)

    async with asyncio.timeout(DEADLINE):
        loop = asyncio.create_task(repeat(work, seconds=NEVER, stopping=stopping, wake=wake, failed="work", rest=rest))
        begun = monotonic()
        while (spent := monotonic() - begun) < seconds or rounds < 2:
            wake.set()
            await asyncio.sleep(0.001)
        assert rounds <= spent / (took * (1 + rest)) + 2
        waits = []
        for _ in range(10):
            await asyncio.sleep(2 * LONGEST_REST_SECONDS)
            again.clear()
            began = monotonic()
            wake.set()
            await again.wait()
            waits.append(monotonic() - began)
        # The quickest, since the machine may be busy: each of them would have waited.
        assert min(waits) < took * rest, "the first wake-up after a pause waited for a rest"
        stopping.set()
        await loop
