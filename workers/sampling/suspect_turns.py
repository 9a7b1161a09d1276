"""Turns of suspects among the samples of one process, so that no sample is given up for the deaths that another one causes.

A sample at which a process or replica has died is a suspect. Few suspects are drawn at a time, beside ordinary samples. One
that has a single attempt left is drawn while no other suspect is: the next death counts as the last one for it alone. After
it the others that wait get a round. Tenants take turns (``engine.sampling.seats``).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from contracts.turn_bounds import SAMPLE_QUANTUM
from engine.round_robin import Fairness
from engine.sampling.seats import Seats, hand_out

_TOGETHER = Seats.within(16)
"""Suspects that are drawn together."""
_ALONE = Seats(1, 0)


@dataclass(eq=False, slots=True)
class _Suspect:
    """A suspect that waits for its turn or has it."""

    tenant: str
    share: float
    has_turn: asyncio.Event = field(default_factory=asyncio.Event)
    cost: int = SAMPLE_QUANTUM
    """One turn's tokens: how many the sample takes says nothing of its dangers."""


class _Line:
    """Suspects that wait, oldest first, by tenant."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._fairness = Fairness()
        self._waiting: dict[str, dict[_Suspect, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, suspect: _Suspect) -> None:
        """Have the suspect wait."""
        self._waiting.setdefault(suspect.tenant, {})[suspect] = None

    def remove(self, suspect: _Suspect) -> None:
        """Have the suspect wait no more, if it does."""
        mine = self._waiting.get(suspect.tenant, {})
        mine.pop(suspect, None)
        if not mine:
            self._waiting.pop(suspect.tenant, None)

    def let_in(self, drawn: set[_Suspect]) -> None:
        """Give turns to those for whom there is room beside ``drawn``, to which they are added."""
        held = Counter(suspect.tenant for suspect in drawn)
        shares = {suspect.tenant: suspect.share for suspect in drawn}
        shares |= {tenant: next(iter(mine)).share for tenant, mine in self._waiting.items()}
        given, self._fairness = hand_out(self._waiting, held, self._fairness, seats=self._seats, shares=shares)
        for suspect in given:
            self.remove(suspect)
            drawn.add(suspect)
            suspect.has_turn.set()


class SuspectTurns:
    """Bound of the suspects that one process draws at a time. Used from one event loop."""

    def __init__(self, most_attempts: int) -> None:
        self._most_attempts = most_attempts
        self._last = _Line(_ALONE)
        """Suspects with a single attempt left that wait."""
        self._others = _Line(_TOGETHER)
        self._drawn_last: set[_Suspect] = set()
        self._drawn_others: set[_Suspect] = set()
        self._is_round_due = False
        """True once a suspect with a single attempt left was drawn, until the others have had a round."""

    @asynccontextmanager
    async def turn(self, attempts: int, tenant: str, share: float = 1.0) -> AsyncIterator[None]:
        """Wait until a sample with ``attempts`` attempts may be drawn, and hold its turn. An ordinary sample does not wait."""
        if not attempts:
            yield
            return
        is_last = attempts >= self._most_attempts - 1
        line, drawn = (self._last, self._drawn_last) if is_last else (self._others, self._drawn_others)
        suspect = _Suspect(tenant, share)
        line.add(suspect)
        self._let_in()
        try:
            await suspect.has_turn.wait()
            yield
        finally:
            line.remove(suspect)
            drawn.discard(suspect)
            self._let_in()

    def _let_in(self) -> None:
        """Give turns to the suspects that may be drawn now."""
        if self._drawn_last:
            return
        if self._last and not (self._is_round_due and self._others):
            if not self._drawn_others:
                self._last.let_in(self._drawn_last)
                self._is_round_due = True
        elif self._others:
            self._others.let_in(self._drawn_others)
            self._is_round_due = False
