"""Hand-over from the replica's thread to the event loop: what a turn made for all requests goes over in one call."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from contracts.errors import WeftError
from engine.sampling.event_stream import EventStream
from engine.sampling.replica import GenerateEvent


class Outbox:
    """Gathers on the worker's thread; ``flush`` hands over to the streams and waiters of ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: dict[EventStream, list[GenerateEvent]] = {}
        self._ends: list[tuple[EventStream, WeftError | None]] = []
        self._answers: list[tuple[asyncio.Future[bool], bool]] = []

    def add(self, stream: EventStream, event: GenerateEvent) -> None:
        """The next event of ``stream``."""
        self._events.setdefault(stream, []).append(event)

    def end(self, stream: EventStream, error: WeftError | None) -> None:
        """``stream`` ends after its events so far."""
        self._ends.append((stream, error))

    def answer(self, waiter: asyncio.Future[bool], result: bool) -> None:
        """Resolve ``waiter`` after all events so far."""
        self._answers.append((waiter, result))

    def flush(self) -> None:
        """Hand over what has gathered."""
        if not (self._events or self._ends or self._answers):
            return
        events, self._events = self._events, {}
        ends, self._ends = self._ends, []
        answers, self._answers = self._answers, []
        # A loop that was closed without closing the replica: nobody is left to listen.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_deliver, events, ends, answers)


def _deliver(
    events: dict[EventStream, list[GenerateEvent]],
    ends: Sequence[tuple[EventStream, WeftError | None]],
    answers: Sequence[tuple[asyncio.Future[bool], bool]],
) -> None:
    for stream, new in events.items():
        stream.put(new)
    for stream, error in ends:
        stream.end(error)
    for waiter, result in answers:
        if not waiter.done():
            waiter.set_result(result)
