"""Hands events from the in-process replica's worker thread to the event loop, all of a turn in one call.

A call into the loop for each token would cost more than the token's own bookkeeping.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from contracts.errors import WeftError
from engine.sampling.event_stream import EventStream
from engine.sampling.replica import GenerateEvent


class Outbox:
    """Events gathered on the worker's thread until ``flush`` hands them to the streams and waiters of ``loop``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: dict[EventStream, list[GenerateEvent]] = {}
        self._ends: list[tuple[EventStream, WeftError | None]] = []
        self._answers: list[tuple[asyncio.Future[bool], bool]] = []

    def add(self, stream: EventStream, event: GenerateEvent) -> None:
        """Add the next event of ``stream``."""
        self._events.setdefault(stream, []).append(event)

    def end(self, stream: EventStream, error: WeftError | None) -> None:
        """End ``stream`` after its events so far, with ``error`` if there is one."""
        self._ends.append((stream, error))

    def answer(self, waiter: asyncio.Future[bool], result: bool) -> None:
        """Resolve ``waiter`` with ``result`` after all events so far."""
        self._answers.append((waiter, result))

    def flush(self) -> None:
        """Hand over everything gathered so far."""
        if not (self._events or self._ends or self._answers):
            return
        events, self._events = self._events, {}
        ends, self._ends = self._ends, []
        answers, self._answers = self._answers, []
        # The loop may have been closed before the replica; then no stream has a reader.
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
