"""Queue of one generate request's events, between the replica that adds them and the one reader of the request."""

import asyncio
from collections.abc import Sequence

from contracts.errors import WeftError
from engine.sampling.replica import GenerateEvent


class EventStream:
    """Events of one request, for one reader. All methods are for the event loop's thread."""

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
        """End the stream; the reader gets ``error``, if there is one, after the events. Only the first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def next(self) -> Sequence[GenerateEvent] | None:
        """Wait for events; return all since the last call, None at the end. Raises the error that the stream ended with."""
        await self._changed.wait()
        if self._events:
            events, self._events = self._events, []
            if not self._ended:
                self._changed.clear()
            return events
        if self._error is not None:
            raise self._error
        return None
