"""Places on a vLLM server: most sequences sent at once, which owners of requests take in turns by tokens.

vLLM serves what waits in its own queue oldest first. So no more is sent than it works on at once, and what waits for a place
waits here.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.round_robin import Fairness
from engine.sampling.replica import GenerateRequest
from engine.sampling.seats import Seats, hand_out


@dataclass(slots=True, eq=False)
class Place:
    """A place that a sequence waits for or holds. ``drawn`` are the tokens that it has drawn."""

    request: GenerateRequest
    cost: int
    given: "asyncio.Future[None]"
    drawn: int = 0


class Places:
    """Places of one server. Used from one event loop."""

    def __init__(self, total: int) -> None:
        self._seats = Seats.within(total)
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[Place]] = {}
        self._fairness = Fairness()

    @asynccontextmanager
    async def place(self, request: GenerateRequest, *, is_first: bool) -> AsyncIterator[Place]:
        """Hold a place for a sequence of ``request`` inside the block. Its tokens beyond ``drawn`` are given back at the end."""
        place = Place(request, request.cost(is_first=is_first), asyncio.get_running_loop().create_future())
        owner = request.turn_taker
        self._waiting.setdefault(owner, deque()).append(place)
        self._hand_out()
        try:
            await place.given
            yield place
        finally:
            if place.given.cancelled():
                self._forget(owner, place)
            else:
                self._held[owner] -= 1
                if not self._held[owner]:
                    del self._held[owner]
                self._fairness = self._fairness.credit(owner, request.max_tokens - place.drawn)
            self._hand_out()

    def _forget(self, owner: str, place: Place) -> None:
        waiting = self._waiting.get(owner)
        if waiting is not None and place in waiting:
            waiting.remove(place)
            if not waiting:
                del self._waiting[owner]

    def _hand_out(self) -> None:
        if not self._waiting or self._held.total() >= self._seats.total:
            return
        shares = {owner: waiting[0].request.share for owner, waiting in self._waiting.items()}
        given, self._fairness = hand_out(
            self._waiting, self._held, self._fairness, seats=self._seats, shares=shares, fits=_is_wanted
        )
        for place in given:
            owner = place.request.turn_taker
            self._forget(owner, place)
            self._held[owner] += 1
            place.given.set_result(None)


def _is_wanted(place: Place) -> bool:
    """Return whether the place is still waited for; a cancelled one is forgotten before the next turn."""
    return not place.given.done()
