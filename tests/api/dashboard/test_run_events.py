"""Streams of a run's page: a page that comes back gets no point twice, and no tenant gets another's."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from api.dashboard.run_feeds import RunFeeds
from tenants.run_history import RunEventKind, note_run_events
from tests.api.dashboard.test_run_feeds import seen_until, step
from tests.api.dashboard.visits import key_of, visitor
from tests.api.test_points import steps

SECONDS = 60


async def _first(lines: AsyncIterator[str], name: str) -> Any:
    """Return the data of the stream's first event of that name."""
    async for line in lines:
        if line == f"event: {name}":
            return orjson.loads((await anext(lines)).removeprefix("data: "))
    raise AssertionError(f"the stream ended without {name}")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [("3", [4, 5]), ("0", [1, 2, 3, 4, 5]), (None, [2, 3, 4, 5])]
    + [(wrong, [2, 3, 4, 5]) for wrong in ("", "x", "-1", "3.0", "9" * 17)],
)
async def test_a_stream_goes_on_after_the_last_event_that_the_page_has_seen(
    service, cats, dogs, seen: str | None, expected: list[int]
) -> None:
    """The address is that of the first stream, for ever: a browser comes back with ``Last-Event-ID``."""
    run, theirs = await cats.run(), await dogs.run()
    await steps(cats, run, [4.0] * 5)
    await steps(dogs, theirs, [1.0])
    headers = {} if seen is None else {"last-event-id": seen}
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, cats.key) as http,
        visitor(service, dogs.key) as other,
        http.stream("GET", f"/ui/runs/{run}/events?after=1", headers=headers) as answer,
        other.stream("GET", f"/ui/runs/{theirs}/events") as beside,
    ):
        assert [one["step"] for one in await _first(answer.aiter_lines(), "points")] == expected
        assert [one["step"] for one in await _first(beside.aiter_lines(), "points")] == [1]


async def test_a_feed_gives_nothing_of_a_run_to_another_tenant(service, cats, dogs) -> None:
    """A feed checks the tenant itself, beside the page, also while the run's own tenant follows it."""
    run = await cats.run()
    await steps(cats, run, [4.0] * 2)
    feeds = RunFeeds(service.services)
    own = asyncio.create_task(seen_until(feeds.watch(cats.id, run, 0, asyncio.Event()), 3))
    await service.wakeups.until_listened(f"steps:{run}")
    async with asyncio.timeout(SECONDS):
        seen = [one async for one in feeds.watch(dogs.id, run, 0, asyncio.Event())]
        assert [one for one in seen if one is not None] == []
        await step(cats, run, 3)
        assert await own == [1, 2, 3]


async def test_a_run_that_an_operator_moved_has_its_mark_without_the_operators_reason(service, cats, dogs) -> None:
    run, theirs = await cats.run(), await dogs.run()
    key, stranger = await key_of(service, cats), await key_of(service, dogs)
    async with service.database.write() as transaction:
        for kind in (RunEventKind.CLAIMED, RunEventKind.MOVED, RunEventKind.EVICTED):
            await note_run_events(
                transaction, [run], kind, trainer="trainer-7f", now=service.clock(), detail="rack 12 burns"
            )
    async with (
        asyncio.timeout(SECONDS),
        visitor(service, key.secret) as http,
        visitor(service, stranger.secret) as other,
        http.stream("GET", f"/ui/runs/{run}/events") as answer,
        other.stream("GET", f"/ui/runs/{theirs}/events") as beside,
    ):
        marks = {one["kind"]: one["text"] for one in await _first(answer.aiter_lines(), "marks")}
        assert marks["moved"] == "The run moved to another trainer"
        assert {"claimed", "evicted"} <= marks.keys()
        foreign = {one["kind"] for one in await _first(beside.aiter_lines(), "marks")}
        assert foreign.isdisjoint({"moved", "claimed", "evicted"})
        page = (await http.get(f"/ui/runs/{run}")).text
        assert 'data-kind="moved"' in page
        for secret in ("trainer-7f", "rack 12"):
            assert secret not in page + str(marks)
