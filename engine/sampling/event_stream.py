"""The events of one request on the event loop, from the replica to its one reader."""

import asyncio
from collections.abc import Sequence

from contracts.errors import WeftError
from engine.sampling.replica import GenerateEvent


class EventStream:
    """The events of one request on the event loop, for one reader. ``put`` and ``end`` belong to the loop's thread."""

    def __init__(self) -> None:
        self._events: list[GenerateEvent] = []
        self._changed = asyncio.Event()
        self._ended = False
        self._error: WeftError | None = None

    def put(self, events: Sequence[GenerateEvent]) -> None:
        """Append ``events``."""
        self._events.extend(events)
        self._changed.set()

    def end(self, error: WeftError | None) -> None:
        """Nothing more follows; the reader gets ``error``, if any, after the events. Only the first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def next(self) -> Sequence[GenerateEvent] | None:
        """All events since the last call, at least one; None at the end. Raises the error that the stream ended with."""
        await self._changed.wait()
        if self._events:
            events, self._events = self._events, []
            if not self._ended:
                self._changed.clear()
            return events
        if self._error is not None:
            raise self._error
        return None
