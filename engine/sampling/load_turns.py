"""Turns of adapter versions that wait for a place on a replica, handed out to owners as seats are (``engine.sampling.seats``).

Many versions of one owner leave some places free for an owner that comes, and its version is the next one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.turn_bounds import SAMPLE_QUANTUM
from engine.round_robin import Fairness
from engine.sampling.seats import Seats, hand_out

Waiting = TypeVar("Waiting")


@dataclass(frozen=True, slots=True)
class _Turn(Generic[Waiting]):
    """A version of an owner. A turn of an owner of share 1 is one version."""

    waiting: Waiting
    owner: str
    cost: int = SAMPLE_QUANTUM


class LoadTurns(Generic[Waiting]):
    """Versions that wait, each behind its owner's older ones. Not thread-safe."""

    def __init__(self, places: int) -> None:
        """``places`` is how many versions the replica has at most, of all owners together."""
        self._seats = Seats.within(places)
        self._waiting: dict[str, dict[Waiting, None]] = {}
        self._shares: dict[str, float] = {}
        self._fairness = Fairness()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, waiting: Waiting, owner: str, share: float) -> None:
        """Let a version wait in its owner's turns. Added by several owners, it is taken in the first of their turns."""
        self._waiting.setdefault(owner, {})[waiting] = None
        self._shares[owner] = share

    def discard(self, waiting: Waiting) -> None:
        """Forget a version that waits no longer."""
        for owner in [owner for owner, versions in self._waiting.items() if waiting in versions]:
            del self._waiting[owner][waiting]
            if not self._waiting[owner]:
                del self._waiting[owner], self._shares[owner]

    def take(self, held: Mapping[str, int]) -> tuple[Waiting, str] | None:
        """Remove the next version that may have a place, and return it with the owner whose turn it was.

        ``held`` are the places with versions in use, by owner. Return None when no version may have a place now.
        """
        left = iter((True,))
        given, self._fairness = hand_out(
            {owner: _turns(owner, versions) for owner, versions in self._waiting.items()},
            held,
            self._fairness,
            seats=self._seats,
            shares=self._shares,
            fits=lambda _: next(left, False),
        )
        for turn in given:
            self.discard(turn.waiting)
            return turn.waiting, turn.owner
        return None


def _turns(owner: str, versions: Iterable[Waiting]) -> Iterator[_Turn[Waiting]]:
    for version in versions:
        yield _Turn(version, owner)
