"""Feeds of runs: one reader for all viewers, each point once and in order, and an end with the process."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

import orjson
import pytest
from sqlalchemy import event

from api.dashboard.run_curves import RunCurves
from api.dashboard.run_feeds import EVENTS_A_SECOND, PACE_SECONDS, SLOWEST_SECONDS, FeedEvent, RunFeeds
from contracts.operations import ForwardBackwardOutput, OperationKind, OptimStepped
from tenants.curves import Series
from tenants.run_points import MOST_PLACES, points_of_many
from tests.api.test_points import PASS, steps


async def step(tenant, run: str, number: int) -> None:
    """Have a pass and an optimizer step done, the run's step ``number``."""
    await tenant.operation(run, 2 * number - 1, kind=OperationKind.FORWARD_BACKWARD, payload=PASS)
    await tenant.service.run_next(ForwardBackwardOutput([], {"loss:sum": 1.0, "tokens:sum": 4.0, "weights:sum": 2.0}))
    await tenant.operation(run, 2 * number)
    await tenant.service.run_next(OptimStepped({"grad_norm:max": 3.0, "step:max": float(number)}))


async def seen_until(events: AsyncIterator[FeedEvent | None], last: int) -> list[int]:
    """Return the steps that a viewer gets until ``last``."""
    seen: list[int] = []
    async with asyncio.timeout(60):
        async for one in events:
            if one is not None and one.name == "points":
                found = [point["step"] for point in orjson.loads(one.data)]
                assert one.id == found[-1]
                seen += found
            if seen and seen[-1] >= last:
                break
    return seen


def watch(feeds: RunFeeds, tenant, run: str) -> AsyncGenerator[FeedEvent | None, None]:
    """Watch the tenant's run from its first step on."""
    return feeds.watch(tenant.id, run, 0, asyncio.Event())


@pytest.fixture
def feeds(service) -> RunFeeds:
    return RunFeeds(service.services)


async def test_viewers_get_each_point_once_from_where_they_are(cats, feeds: RunFeeds) -> None:
    run = await cats.run()
    await steps(cats, run, [4.0] * 5)
    viewers = [
        asyncio.create_task(seen_until(feeds.watch(cats.id, run, after, asyncio.Event()), 8)) for after in (0, 3, 5)
    ]
    await cats.service.wakeups.until_listened(f"steps:{run}")
    for number in (6, 7, 8):
        await step(cats, run, number)
    assert await asyncio.gather(*viewers) == [list(range(1, 9)), list(range(4, 9)), list(range(6, 9))]


@contextmanager
def statements(service) -> Iterator[list[str]]:
    """Note the statements that the service's database gets."""
    noted: list[str] = []

    def note(_connection, _cursor, statement, *_) -> None:
        noted.append(statement)

    engine = service.database.engine.sync_engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(engine, "before_cursor_execute", note)


def of_points(noted: list[str]) -> list[str]:
    return [one for one in noted if "FROM run_points" in one and "loss_weight" in one]


async def test_fifty_viewers_cost_the_reads_of_one(cats, feeds: RunFeeds) -> None:
    run = await cats.run()
    await steps(cats, run, [4.0] * 2)
    with statements(cats.service) as noted:
        viewers = [asyncio.create_task(seen_until(watch(feeds, cats, run), 4)) for _ in range(50)]
        await cats.service.wakeups.until_listened(f"steps:{run}")
        for number in (3, 4):
            await step(cats, run, number)
        assert await asyncio.gather(*viewers) == [[1, 2, 3, 4]] * 50
    # The first read, and one after each step; a look that finds nothing new reads no points.
    assert 1 <= len(of_points(noted)) <= 3


async def test_runs_that_step_together_are_read_together(cats, dogs, feeds: RunFeeds) -> None:
    own, theirs = [await cats.run() for _ in range(4)], await dogs.run()
    for run in own:
        await steps(cats, run, [4.0])
    await steps(dogs, theirs, [4.0] * 2)
    with statements(cats.service) as noted:
        viewers = [asyncio.create_task(seen_until(watch(feeds, cats, run), 1)) for run in own]
        viewers.append(asyncio.create_task(seen_until(watch(feeds, dogs, theirs), 2)))
        assert await asyncio.gather(*viewers) == [[1]] * 4 + [[1, 2]]
    assert len(heads(noted)) == 1
    assert len(of_points(noted)) == 1


async def test_each_of_many_places_gets_its_own_points(cats, dogs) -> None:
    """More places than one statement reads, and no power of two of them."""
    losses = {}
    for number in range(MOST_PLACES + 3):
        tenant = (cats, dogs)[number % 2]
        run = await tenant.run()
        losses[run] = [float(number + 1)] * (1 + number % 2)
        await steps(tenant, run, losses[run])
    async with cats.service.database.read() as session:
        found = await points_of_many(session, [(run, 0) for run in losses])
    assert [[point.loss_sum for point in points] for points in found] == list(losses.values())


async def test_feeds_that_began_apart_read_at_the_same_instants(cats, feeds: RunFeeds) -> None:
    """Four runs that step on and on, watched from different times on: the heads are read once an instant, not once a run."""
    runs = [await cats.run() for _ in range(4)]
    watching = []
    for run in runs:
        await step(cats, run, 1)
        watching.append(watch(feeds, cats, run))
        assert await seen_until(watching[-1], 1) == [1]
    loop, number = asyncio.get_running_loop(), 1
    with statements(cats.service) as noted:
        viewers = [asyncio.create_task(seen_until(one, 10**6)) for one in watching]
        began = loop.time()
        while loop.time() - began < 6 * PACE_SECONDS:
            number += 1
            for run in runs:
                await step(cats, run, number)
                # SQLite waits for nothing: the feeds have their turn here.
                await asyncio.sleep(0)
        instants = (loop.time() - began) / PACE_SECONDS + 2
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
    # A feed that had nothing to read for a while reads as soon as there is something.
    assert len(heads(noted)) <= instants + len(runs)
    assert len(of_points(noted)) <= instants + len(runs)


def heads(noted: list[str]) -> list[str]:
    return [one for one in noted if "FROM runs" in one and "max(run_events.id)" in one]


async def test_marks_are_read_again_only_when_there_may_be_more(cats, feeds: RunFeeds, monkeypatch) -> None:
    monkeypatch.setattr("api.dashboard.run_feeds._TOLD_SECONDS", 0.0)
    run = await cats.run()
    kinds: list[str] = []
    with statements(cats.service) as noted:
        async with asyncio.timeout(60):
            async for one in watch(feeds, cats, run):
                if one is not None and one.name == "points" and one.id == 4:
                    assert len([told for told in noted if "FROM checkpoints" in told and "max(" not in told]) == 1
                    await cats.checkpoint(run, "one")
                    await step(cats, run, 5)
                elif one is not None and one.name == "points":
                    if one.id < 4:
                        await step(cats, run, one.id + 1)
                elif one is not None and one.name == "marks":
                    kinds += [mark["kind"] for mark in orjson.loads(one.data)]
                    if "checkpoint" in kinds:
                        break
                    await step(cats, run, 1)
    assert kinds == ["session_opened", "checkpoint"]


async def test_the_more_watch_the_slower_a_feed_reads_but_not_slower_than_a_second(cats, feeds: RunFeeds) -> None:
    run = await cats.run()
    await steps(cats, run, [4.0])
    paces = []
    for count in (1, 40, 200):
        watching = [watch(feeds, cats, run) for _ in range(count)]
        for one in watching:
            await anext(one)
        (feed,) = feeds._feeds.values()
        paces.append(feed.pace)
        for one in watching:
            await one.aclose()
    assert paces == [PACE_SECONDS, 40 / EVENTS_A_SECOND, SLOWEST_SECONDS]
    assert SLOWEST_SECONDS < 1.0


async def test_a_viewer_far_behind_misses_nothing(cats, feeds: RunFeeds, monkeypatch) -> None:
    monkeypatch.setattr("api.dashboard.run_feeds.KEPT_POINTS", 2)
    run = await cats.run()
    await steps(cats, run, [4.0] * 9)
    assert await seen_until(watch(feeds, cats, run), 9) == list(range(1, 10))


async def test_a_viewer_too_far_behind_is_told_to_read_the_curve(cats, feeds: RunFeeds, monkeypatch) -> None:
    monkeypatch.setattr("api.dashboard.run_feeds.FAR_BEHIND", 3)
    run = await cats.run()
    await steps(cats, run, [4.0] * 9)
    found: list[tuple[str, int | None]] = []
    async with asyncio.timeout(60):
        async for one in watch(feeds, cats, run):
            if one is not None and one.name in ("reset", "points"):
                found.append((one.name, one.id))
                if one.name == "points":
                    break
                await step(cats, run, 10)
    assert found == [("reset", 9), ("points", 10)]


async def test_marks_and_the_standing_are_told_as_they_come(cats, feeds: RunFeeds) -> None:
    run = await cats.run()
    names: list[str] = []
    kinds: list[str] = []
    async with asyncio.timeout(60):
        async for one in watch(feeds, cats, run):
            if one is None:
                continue
            names.append(one.name)
            if one.name == "marks":
                kinds += [mark["kind"] for mark in orjson.loads(one.data)]
                if len(kinds) > 1:
                    break
                await cats.checkpoint(run, "one")
                await steps(cats, run, [4.0])
    assert "standing" in names
    assert kinds == ["session_opened", "checkpoint"]


async def test_streams_end_with_the_process(cats, feeds: RunFeeds) -> None:
    run = await cats.run()
    watching = asyncio.create_task(seen_until(watch(feeds, cats, run), 1))
    await cats.service.wakeups.until_listened(f"steps:{run}")
    cats.service.wakeups.close()
    async with asyncio.timeout(30):
        assert await watching == []


async def test_a_curve_is_read_on_where_it_was_left(cats) -> None:
    run = await cats.run()
    curves = RunCurves(cats.service.database)
    await steps(cats, run, [8.0, 6.0])
    assert (await curves.series(run, Series.MEAN_LOSS)).value == [4.0, 3.0]
    await step(cats, run, 3)
    told = await curves.series(run, Series.MEAN_LOSS)
    assert (told.step, told.value) == ([1, 2, 3], [4.0, 3.0, 0.5])
    assert (await curves.range_of(run, Series.MEAN_LOSS, 2, 2)).step == [2]
    assert (await curves.series(run, Series.SAMPLING_KL)).value == [None, None, None]
