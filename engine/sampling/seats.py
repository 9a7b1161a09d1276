"""Seats: room of a replica or a pool for so many sequences or samples at once, handed out fairly between tenants.

Three rules, all pure:

- Order: free seats go round by ``engine.round_robin``, by tokens. What an item did not use of its cost is credited.
- Bound: a tenant holds at most ``share * seats / spare`` times the free seats, and ``seats`` at most. Its share is taken
  relative to the largest one among the tenants that wait or hold. So some seats are
  always free for a tenant that comes, and several floods divide the seats between them by their shares (Choudhury and
  Hahne 1998, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches").
- Work: one tenant alone can hold all ``seats``. The ``spare`` seats come on top.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from contracts.turn_bounds import SAMPLE_QUANTUM
from engine.round_robin import Fairness, HasCost, Verdict, take_turns

_SPARE_PART = 8

Item = TypeVar("Item", bound=HasCost)


@dataclass(frozen=True, slots=True)
class Seats:
    """Number of seats, and of the spare ones beyond them."""

    seats: int
    spare: int

    @classmethod
    def of(cls, seats: int) -> "Seats":
        """Return ``seats`` with an eighth more to spare."""
        return cls(seats, math.ceil(seats / _SPARE_PART))

    @classmethod
    def within(cls, total: int) -> "Seats":
        """Return seats that are ``total`` together with the spare ones. ``total`` is at least 1."""
        spare = total // (_SPARE_PART + 1)
        return cls(total - spare, spare)

    @property
    def total(self) -> int:
        """Number of all seats."""
        return self.seats + self.spare

    def bound(self, free: int, share: float) -> float:
        """Return how many seats a tenant may hold at most while ``free`` are free."""
        return min(self.seats, share * free * self.seats / self.spare) if self.spare else self.seats


def hand_out(
    items: Mapping[str, Iterable[Item]],
    held: Mapping[str, int],
    fairness: Fairness,
    *,
    seats: Seats,
    shares: Mapping[str, float],
    fits: Callable[[Item], bool] = lambda _: True,
) -> tuple[list[Item], Fairness]:
    """Return the items that get a seat now, in fair order, and the new state.

    ``items`` wait, oldest first, by tenant. ``held`` are the seats that each tenant holds, ``shares`` the tenants' weights; a
    tenant that is missing has 1.0. An item that does not fit (``fits``) ends the call, and the next call begins with it.
    """
    given: list[Item] = []
    holding = Counter(held)
    free = seats.total - holding.total()
    present = items.keys() | {tenant for tenant, number in held.items() if number > 0}
    largest = max((shares.get(tenant, 1.0) for tenant in present), default=1.0)

    def offer(tenant: str, item: Item) -> Verdict:
        nonlocal free
        if free <= 0:
            return Verdict.FULL
        if holding[tenant] >= seats.bound(free, shares.get(tenant, 1.0) / largest):
            return Verdict.LATER
        if not fits(item):
            return Verdict.FULL
        free -= 1
        holding[tenant] += 1
        given.append(item)
        return Verdict.TAKEN

    if free <= 0:
        return given, fairness
    quanta = {tenant: SAMPLE_QUANTUM * shares.get(tenant, 1.0) for tenant in items}
    return given, take_turns(items, fairness, quanta=quanta, offer=offer)
