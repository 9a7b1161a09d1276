"""Streams of events to pages: one a page, ended with its session, its key or the process, without a database connection."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import orjson
from fastapi import Request
from fastapi.responses import StreamingResponse

from api.dashboard.event_bytes import encoded_event
from api.dashboard.session_watch import SessionWatch
from api.services import ApiServices

MOST_STREAMS = 4
"""Most streams of one web session in one process; a further one ends the oldest. A browser has six connections a host."""
KEEP_ALIVE_SECONDS = 7.5
"""Time after which a stream that has told nothing since the last such time tells that it is there."""
RETRY_MILLISECONDS = 1000
DISPLACED_MILLISECONDS = 60_000
_CLOSING = "streams"
"""Topic that nobody announces: its listeners are woken when the process shuts down."""


class StreamEvent(Protocol):
    """An event as a stream carries it, in bytes."""

    @property
    def encoded(self) -> bytes:
        """The event's bytes."""


@dataclass(frozen=True, slots=True)
class PageEvent:
    """An event of a stream."""

    name: str
    data: object

    @property
    def encoded(self) -> bytes:
        """The event as a stream carries it."""
        return encoded_event(self.name, orjson.dumps(self.data))


_DISPLACED = PageEvent("displaced", {})
"""Tells a page that another of its session took its stream: the service is there all the same."""

Events = Callable[[asyncio.Event], AsyncGenerator[StreamEvent | None, None]]
"""Makes a stream's events from its bell. They have a None, at which the stream may end, whenever the bell was rung."""


@dataclass(eq=False, slots=True)
class OpenStream:
    """A stream that is open. ``bell`` is rung for it to look whether it is to end."""

    bell: asyncio.Event
    is_displaced: bool = False
    is_over: bool = False

    def end(self) -> None:
        """End the stream; its page comes back soon, and is told why."""
        self.is_over = True
        self.bell.set()

    def displace(self) -> None:
        """End the stream; its page is told ``displaced``, and comes back a minute later at the soonest."""
        self.is_displaced = True
        self.bell.set()


class Streams:
    """Open streams of one process, by web session."""

    def __init__(self) -> None:
        self._open: defaultdict[int, list[OpenStream]] = defaultdict(list)

    def enter(self, session: int, bell: asyncio.Event) -> OpenStream:
        """Open a stream. The session's oldest ones end beyond ``MOST_STREAMS``."""
        stream = OpenStream(bell)
        streams = self._open[session]
        streams.append(stream)
        for oldest in streams[:-MOST_STREAMS]:
            oldest.displace()
        return stream

    def leave(self, session: int, stream: OpenStream) -> None:
        """Note that the stream has ended."""
        self._open[session].remove(stream)
        if not self._open[session]:
            del self._open[session]

    def end(self, session: int) -> None:
        """End all of the session's streams."""
        for stream in self._open.get(session, ()):
            stream.end()


def last_event_id(request: Request) -> str | None:
    """Return the id of the last event that the page has seen."""
    return request.headers.get("last-event-id")


def event_stream(
    request: Request, services: ApiServices, events: Events, *, run: str | None = None
) -> StreamingResponse:
    """Return the stream of ``events``, of ``run`` if they tell of one, to the page.

    It ends within seconds once its session is refused, or reaches the run no more, and at the process's stop signal; the page
    then comes back to another process. Declare the endpoint ``@bounded(holding=Holding.STREAM)``.
    """
    body = _followed(request, services, events, run)
    return StreamingResponse(
        body, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


async def _followed(request: Request, services: ApiServices, events: Events, run: str | None) -> AsyncIterator[bytes]:
    streams: Streams = request.app.state.streams
    watch: SessionWatch = request.app.state.session_watch
    session: int = request.state.web_session
    wakeups = services.runtime.wakeups
    bell = asyncio.Event()
    stream = streams.enter(session, bell)
    pulse, is_silent = _Pulse(bell), False
    try:
        with watch.watch(request, bell, run) as refused, wakeups.listen(_CLOSING, event=bell):
            yield _retry(RETRY_MILLISECONDS)
            async with aclosing(events(bell)) as made:
                async for event in made:
                    if wakeups.is_closed or refused.is_set() or stream.is_over:
                        return
                    if stream.is_displaced:
                        yield _DISPLACED.encoded
                        yield _retry(DISPLACED_MILLISECONDS)
                        return
                    if event is not None:
                        is_silent = False
                        yield event.encoded
                    elif pulse.is_due():
                        if is_silent:
                            yield b": still here\n\n"
                        is_silent = True
    finally:
        pulse.stop()
        streams.leave(session, stream)


class _Pulse:
    """Rings a stream's bell every ``KEEP_ALIVE_SECONDS``."""

    def __init__(self, bell: asyncio.Event) -> None:
        self._bell = bell
        self._is_due = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._ring)

    def _ring(self) -> None:
        self._is_due = True
        self._bell.set()
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._ring)

    def is_due(self) -> bool:
        """Return whether it has rung since it was asked for last."""
        was_due, self._is_due = self._is_due, False
        return was_due

    def stop(self) -> None:
        """Ring no more."""
        self._timer.cancel()


async def with_bell(
    events: AsyncGenerator[StreamEvent, None], bell: asyncio.Event
) -> AsyncGenerator[StreamEvent | None, None]:
    """Yield events that come by themselves, and None whenever ``bell`` was rung. Closing it closes ``events``."""
    nearest: asyncio.Future[StreamEvent] | None = None
    try:
        while True:
            if nearest is None:
                nearest = asyncio.ensure_future(anext(events))
                nearest.add_done_callback(lambda _: bell.set())
            await bell.wait()
            bell.clear()
            yield None
            if nearest.done():
                made, nearest = nearest, None
                try:
                    event = made.result()
                except StopAsyncIteration:
                    return
                yield event
    finally:
        if nearest is not None:
            nearest.cancel()
            await asyncio.wait({nearest})
        await events.aclose()


def _retry(milliseconds: int) -> bytes:
    return f"retry: {milliseconds}\n\n".encode()
