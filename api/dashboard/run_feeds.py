"""Feeds of runs: one reader a run and process hands new points, marks and the run's standing to all who watch it.

Feeds of one process that are woken together read together: one statement tells how far their runs have come.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import orjson

from api.dashboard.event_bytes import encoded_event
from api.dashboard.waiting_words import waiting_words
from api.services import ApiServices
from api.waiting_body import WaitingInfo, waiting_of_run
from api.weft.points import PointInfo
from api.weft.runs import MarkInfo, placed_marks
from contracts.errors import NotFound, WeftError
from contracts.ids import TenantId
from ledger.wakeups import run_steps_topic
from store.batcher import Batcher
from store.repeat import repeat, wait_for_any
from store.tables import Run
from tenants.run_heads import RunHead, run_heads
from tenants.run_lists import ListedRun, listed_run
from tenants.run_marks import read_marks
from tenants.run_points import MOST_POINTS, Point, points_of_many

KEPT_POINTS = 256
"""Newest points of a feed; a viewer that is further behind reads for itself."""
FAR_BEHIND = 2 * MOST_POINTS
"""Points that a viewer may lack and still be sent; one that lacks more reads the curve, which is cut to what a page draws."""
PACE_SECONDS = 0.4
"""Time between two instants at which feeds read, however fast a run is."""
SLOWEST_SECONDS = 0.75
"""The same where many watch: with what it takes to be drawn, a point is on the page within a second."""
EVENTS_A_SECOND = 64
"""Events that a process sends with ease. It slows down to this many, but not below ``SLOWEST_SECONDS``."""
NET_SECONDS = 3.0
"""Most time between two reads: a wake-up may be lost."""
_TOLD_SECONDS = 3.0
"""Least time between two reads of the standing and the marks."""
_QUIET_SECONDS = 15.0
"""Most time between two such reads while nothing of the run changes."""


@dataclass(frozen=True)
class FeedEvent:
    """An event for the viewers of a run, encoded once. ``id``: the last step whose point they have; None leaves it as it was."""

    name: str
    data: bytes
    id: int | None = None

    @cached_property
    def encoded(self) -> bytes:
        """The event as a stream carries it."""
        return encoded_event(self.name, self.data, None if self.id is None else str(self.id))


@dataclass(frozen=True, slots=True)
class _Told:
    """The standing, and marks in the order in which they were found, with what tells whether there are more."""

    standing: FeedEvent
    marks: tuple[MarkInfo, ...]
    head: RunHead
    at: float
    is_waiting: bool
    marks_at: float

    def is_due(self, head: RunHead, now: float) -> bool:
        """Return whether it is to be read again: soon after a change, and while the run waits; else after a while."""
        is_same = head == self.head and not self.is_waiting
        return now - self.at >= (_QUIET_SECONDS if is_same else _TOLD_SECONDS)

    def has_marks_of(self, head: RunHead, now: float) -> bool:
        """Return whether there can be no other marks yet. A pause may end by its time alone, which no row tells."""
        return head.marks == self.head.marks and now - self.marks_at < _QUIET_SECONDS


@dataclass(frozen=True, slots=True)
class _Place:
    """Place on a run's curve; ``after`` None: before its newest ``KEPT_POINTS``."""

    run: str
    after: int | None


@dataclass(frozen=True, slots=True)
class _News:
    """A run's head, and its points after step ``after``."""

    head: RunHead
    after: int
    points: list[Point]


class RunReads:
    """Reads of all feeds of a process; those that are asked for at once are two statements, of heads and of points."""

    def __init__(self, services: ApiServices) -> None:
        self._database = services.runtime.database
        self._batcher: Batcher[_Place, _News] = Batcher(self._read)

    async def after(self, run: str, step: int | None) -> _News:
        """Return what is new of a run after a step, None for its newest points. Raises ``NotFound``."""
        return await self._batcher.ask(_Place(run, step))

    async def _read(self, asked: Sequence[_Place]) -> list[_News | WeftError]:
        async with self._database.read() as session:
            heads = await run_heads(session, [one.run for one in asked])
            places = {one: _step_of(one, heads[one.run]) for one in asked if one.run in heads}
            behind = sorted({(one.run, step) for one, step in places.items() if step < heads[one.run].optimizer_steps})
            points = dict(zip(behind, await points_of_many(session, behind), strict=True))
        return [
            _News(heads[one.run], places[one], points.get((one.run, places[one]), []))
            if one in places
            else NotFound(f"no model {one.run[:150]!r}")
            for one in asked
        ]


class RunFeed:
    """The feed of one run."""

    def __init__(self, services: ApiServices, reads: RunReads, tenant: TenantId, run: str) -> None:
        self._services = services
        self._reads = reads
        self._tenant = tenant
        self.run = run
        self._points: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._last: int | None = None
        self._told: _Told | None = None
        self._newest: tuple[int, FeedEvent] | None = None
        self.over = asyncio.Event()
        self.viewers: set[asyncio.Event] = set()
        """Bells of those who watch."""
        self.pace = PACE_SECONDS

    async def read(self) -> None:
        """Read until ``over``."""
        wakeups = self._services.runtime.wakeups
        with wakeups.listen(run_steps_topic(self.run)) as woken:
            await repeat(
                self._look, seconds=NET_SECONDS, wake=woken, stopping=self.over, failed=f"run {self.run} is not read"
            )
        self._wake()

    async def _look(self) -> None:
        if self._services.runtime.wakeups.is_closed:
            self.over.set()
            return
        try:
            if await self._read_new():
                self._wake()
        except NotFound:
            self.over.set()
            return
        # Feeds of one process look at the same instants, so that one statement answers them all.
        await wait_for_any([self.over], self.pace - monotonic() % self.pace)

    async def _read_new(self) -> bool:
        """Read what is new, and return whether anything is."""
        news = await self._reads.after(self.run, self._last)
        if news.head.tenant != self._tenant:
            raise NotFound(f"no model {self.run[:150]!r}")
        is_new = await self._read_told(news.head)
        self._points.extend(news.points)
        self._last = news.points[-1].step if news.points else news.after
        return bool(news.points) or is_new

    async def _read_told(self, head: RunHead) -> bool:
        """Read the standing and the marks if they are due, and return whether they differ."""
        before, now = self._told, monotonic()
        if before is not None and not before.is_due(head, now):
            return False
        async with self._services.runtime.database.read() as session:
            listed = await listed_run(session, self._tenant, self.run)
            waiting = await waiting_of_run(session, self._services.waits, listed.run)
            new: list[MarkInfo] = []
            marks_at = now if before is None or not before.has_marks_of(head, now) else before.marks_at
            if marks_at == now:
                new = await self._new_marks(session, listed.run)
        standing = _standing(listed, waiting)
        if before is not None and before.standing == standing:
            standing = before.standing
        known = () if before is None else before.marks
        is_waiting = waiting.reason is not None
        self._told = _Told(standing, (*known, *new), head, now, is_waiting=is_waiting, marks_at=marks_at)
        return before is None or standing is not before.standing or bool(new)

    async def _new_marks(self, session: Any, run: Run) -> list[MarkInfo]:
        known = () if self._told is None else self._told.marks
        ids = {mark.id for mark in known}
        marks = await read_marks(session, run, self._services.runtime.clock())
        new = [mark for mark in marks if mark.id not in ids]
        return await placed_marks(session, run, new) if new else []

    def _wake(self) -> None:
        for bell in self.viewers:
            bell.set()

    async def events(self, after: int, bell: asyncio.Event) -> AsyncGenerator[FeedEvent | None, None]:
        """Yield points after step ``after``, the standing and new marks as they come, until the feed is over.

        ``bell`` is rung when there may be more; each time, None comes first. A viewer that is ``FAR_BEHIND`` gets ``reset`` in
        place of the points: it reads the curve anew.
        """
        standing, marks = None, 0
        while not self.over.is_set():
            yield None
            if self._last is not None and self._last - after > FAR_BEHIND:
                after = self._last
                yield FeedEvent("reset", b"{}", after)
            while (event := await self._after(after)) is not None:
                yield event
                after = event.id or after
            if (told := self._told) is not None:
                if told.standing is not standing:
                    standing = told.standing
                    yield standing
                if len(told.marks) > marks:
                    yield FeedEvent("marks", _json([one.model_dump() for one in told.marks[marks:]]))
                    marks = len(told.marks)
            await bell.wait()
            bell.clear()

    async def _after(self, step: int) -> FeedEvent | None:
        """Return the points after a step, None if there are none; the same event for all viewers that have come as far."""
        if self._last is None or step >= self._last:
            return None
        if self._newest is not None and self._newest[0] == step and self._newest[1].id == self._last:
            return self._newest[1]
        if self._points and self._points[0].step <= step + 1:
            found = [point for point in self._points if point.step > step]
        else:
            found = (await self._reads.after(self.run, step)).points
        if not found:
            return None
        event = FeedEvent("points", _json([_body(point) for point in found]), found[-1].step)
        self._newest = (step, event)
        return event


class RunFeeds:
    """The feeds of a process: one for each run that somebody watches, by the tenant that asks for it."""

    def __init__(self, services: ApiServices) -> None:
        self._services = services
        self._reads = RunReads(services)
        self._feeds: dict[tuple[TenantId, str], RunFeed] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def watch(
        self, tenant: TenantId, run: str, after: int, bell: asyncio.Event
    ) -> AsyncGenerator[FeedEvent | None, None]:
        """Yield the events of the tenant's run from step ``after`` on, and None whenever ``bell`` was rung.

        The caller has checked that it may watch the run.
        """
        place = tenant, run
        feed = self._feeds.get(place)
        if feed is None or feed.over.is_set():
            feed = self._feeds[place] = RunFeed(self._services, self._reads, tenant, run)
            reader = asyncio.create_task(feed.read(), name=f"feed of {run}")
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        feed.viewers.add(bell)
        self._set_pace()
        try:
            async for event in feed.events(after, bell):
                yield event
        finally:
            feed.viewers.discard(bell)
            if not feed.viewers:
                feed.over.set()
                if self._feeds.get(place) is feed:
                    del self._feeds[place]
            self._set_pace()

    def _set_pace(self) -> None:
        """Have the feeds read less often the more watch."""
        viewers = sum(len(feed.viewers) for feed in self._feeds.values())
        pace = min(max(PACE_SECONDS, viewers / EVENTS_A_SECOND), SLOWEST_SECONDS)
        for feed in self._feeds.values():
            feed.pace = pace


def _step_of(place: _Place, head: RunHead) -> int:
    return max(0, head.optimizer_steps - KEPT_POINTS) if place.after is None else place.after


def standing_told(
    state: str, end_reason: str | None, waiting: WaitingInfo, metrics: Sequence[str] | None
) -> dict[str, Any]:
    """Return a run's standing as its page is told it, and the names of its user's own metrics."""
    reasons = waiting.model_dump() | {"words": waiting_words(waiting.reason)}
    return {"state": state, "end_reason": end_reason, "waiting": reasons, "metrics": metrics or []}


def _standing(listed: ListedRun, waiting: WaitingInfo) -> FeedEvent:
    return FeedEvent(
        "standing", _json(standing_told(listed.state, listed.end_reason, waiting, listed.run.metric_names))
    )


def _body(point: Point) -> dict[str, Any]:
    return PointInfo.model_validate(point, from_attributes=True).model_dump()


def _json(value: Any) -> bytes:
    return orjson.dumps(value)
