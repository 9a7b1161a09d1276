"""Ends of samples for polls that wait for a whole sampler: one look for all polls of a sampler, which wakes those concerned."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from contracts.errors import Unavailable
from contracts.ids import SamplerId, TenantId
from ledger.told_ends import MOST_ENDS, ToldEnd, ends_after
from ledger.wakeups import Wakeups, ended_samples_topic
from store.batcher import Batcher
from store.clock import Clock
from store.database import Database
from store.repeat import repeat

SEQ_IDS_OF_A_COPY = 1_000_000_000
"""seq_ids of one copy of a sampler's client: copy n sends those from n times it on."""
_SECONDS_TO_NEXT_LOOK = 5.0
"""Longest time between two looks: a wake-up may be lost, and housekeeping may have locked an end."""


class WaitingPolls:
    """Polls of one process that wait, by sampler. A sampler's ends cost as much for very many of its polls as for one."""

    def __init__(self, database: Database, wakeups: Wakeups, clock: Clock) -> None:
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._lanes: dict[SamplerId, SamplerLane] = {}

    @contextmanager
    def of(self, tenant: TenantId, sampler: SamplerId) -> "Iterator[SamplerLane]":
        """Yield the sampler's lane for one poll."""
        lane = self._lanes.get(sampler)
        if lane is None:
            lane = self._lanes[sampler] = SamplerLane(self._database, self._wakeups, self._clock, tenant, sampler)
        lane.polls += 1
        try:
            yield lane
        finally:
            lane.polls -= 1
            if not lane.polls:
                del self._lanes[sampler]
                lane.close()

    def waiting(self, sampler: SamplerId) -> list[asyncio.Event]:
        """Return the events of the sampler's polls that wait for an end."""
        lane = self._lanes.get(sampler)
        return [] if lane is None else lane.waiting()


class SamplerLane:
    """One sampler's ends. ``polls`` are those that use it."""

    def __init__(
        self, database: Database, wakeups: Wakeups, clock: Clock, tenant: TenantId, sampler: SamplerId
    ) -> None:
        self._database = database
        self._wakeups = wakeups
        self._clock = clock
        self._tenant = tenant
        self._sampler = sampler
        self._reads = Batcher(self._read)
        self._waiting: dict[int, set[asyncio.Event]] = {}
        self._position = 0
        self._looking: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.polls = 0

    async def ends_after(self, cursor: int) -> list[ToldEnd]:
        """Return the ends with numbers above ``cursor``, at most ``MOST_ENDS``. Polls with one cursor share the read."""
        return await self._reads.ask(cursor)

    @contextmanager
    def ends_of(self, copy: int, cursor: int) -> Iterator[asyncio.Event]:
        """Yield an event that is set by each end of a copy's samples above ``cursor``, and when the process shuts down."""
        event = asyncio.Event()
        self._waiting.setdefault(copy, set()).add(event)
        if self._looking is None:
            self._position = cursor
            self._looking = asyncio.create_task(self._run(), name="joint polls")
        elif cursor < self._position:
            # The look may have passed over an end while this poll did not wait yet.
            self._position = cursor
            self._wake.set()
        try:
            yield event
        finally:
            self._waiting[copy].discard(event)
            if not self._waiting[copy]:
                del self._waiting[copy]

    def waiting(self) -> list[asyncio.Event]:
        """Return the events of the polls that wait."""
        return [event for events in self._waiting.values() for event in events]

    def close(self) -> None:
        """End the looks."""
        if self._looking is not None:
            self._looking.cancel()

    async def _run(self) -> None:
        with self._wakeups.listen(ended_samples_topic(self._sampler), event=self._wake):
            failed = "the ends of a sampler's samples could not be looked for"
            await repeat(self._look, seconds=_SECONDS_TO_NEXT_LOOK, wake=self._wake, rest=1.0, failed=failed)

    async def _look(self) -> None:
        """Wake the polls of each copy of which a sample has ended."""
        if self._wakeups.is_closed:
            for event in self.waiting():
                event.set()
            return
        # Polls tell an outage themselves, at the end of their hold.
        with suppress(Unavailable):
            ends: list[ToldEnd] | None = None
            while ends is None or len(ends) == MOST_ENDS:
                position = self._position
                ends = await self.ends_after(position)
                self._set(*{end.seq_id // SEQ_IDS_OF_A_COPY for end in ends})
                # A poll that came meanwhile may have set it back.
                if ends and self._position == position:
                    self._position = ends[-1].number

    def _set(self, *copies: int) -> None:
        for copy in copies:
            for event in self._waiting.get(copy, ()):
                event.set()

    async def _read(self, cursors: Sequence[int]) -> list[list[ToldEnd]]:
        found: dict[int, list[ToldEnd]] = {}
        for cursor in dict.fromkeys(cursors):
            found[cursor] = await ends_after(self._database, self._tenant, self._sampler, cursor, self._clock)
            await asyncio.sleep(0)
        return [found[cursor] for cursor in cursors]
