"""Deficit round robin by tokens between tenants: the pure rule by which passes, seats and claims are shared out.

The tenants with work stand in a circle that keeps its order. In its turn a tenant takes items, oldest first, while its
deficit covers their cost. When the deficit does not cover the next item, the turn ends and the quantum of the tenant's
next turn is added (Shreedhar and Varghese 1996, "Efficient Fair Queuing Using Deficit Round-Robin"). A tenant without
work leaves the circle when its turn comes. A tenant that joins enters at the front, so light work does not wait behind a
flood. No tenant gains by leaving and coming back: its old place stays taken until the circle reaches it.

Fairness: over any calls through which two tenants of shares s and s' have work that is not put off, the cost taken for
each, divided by its share, differs by less than 3 * Q + L / s + L / s'. Q is the quantum of share 1, L the largest cost.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar


class HasCost(Protocol):
    """An item that waits for its turn."""

    @property
    def cost(self) -> int:
        """Tokens that the item takes from its tenant's deficit."""


Item = TypeVar("Item", bound=HasCost)


class Verdict(Enum):
    """Answer to an item whose turn has come."""

    TAKEN = "taken"
    LATER = "later"
    """The tenant's items are put off until the next call. The tenant keeps its deficit."""
    FULL = "full"
    """Nothing more is taken by this call. The next call begins with the item."""


def _nothing() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Fairness:
    """State between calls, immutable. ``Fairness()`` is the beginning.

    ``deficits`` are the tokens each tenant may take in its next turn, or in the rest of the turn under way.
    ``turn`` is the circle, beginning with the tenant whose turn it is.
    """

    deficits: Mapping[str, float] = field(default_factory=_nothing)
    turn: tuple[str, ...] = ()

    def credit(self, tenant: str, tokens: float) -> "Fairness":
        """Return the state after ``tokens`` that the tenant took and did not use were given back to it.

        A tenant that has left the circle has nothing to be made good: it begins anew when it comes back.
        """
        if tokens <= 0 or tenant not in self.deficits:
            return self
        return Fairness(MappingProxyType({**self.deficits, tenant: self.deficits[tenant] + tokens}), self.turn)


def take_turns(
    items: Mapping[str, Iterable[Item]],
    fairness: Fairness,
    *,
    quanta: Mapping[str, float],
    offer: Callable[[str, Item], Verdict],
) -> Fairness:
    """Offer the tenants' items in fair order until one is answered ``FULL`` or none is left; return the new state.

    ``items`` are each tenant's, oldest first, read only as far as needed. Tenants that join stand in the order of
    ``items``. ``quanta`` are above 0, one for each tenant of ``items``.
    """
    circle = _circle(items, fairness, quanta)
    waiting = sum(account.is_waiting for account in circle)
    fruitless = 0
    while waiting:
        account = circle[0]
        if account.head is None:
            circle.popleft()
            continue
        fruitless += 1
        while account.is_waiting and account.head.cost <= account.deficit:
            verdict = offer(account.tenant, account.head)
            if verdict is Verdict.FULL:
                return _state(circle)
            fruitless = 0
            if verdict is Verdict.LATER:
                account.is_put_off = True
            else:
                account.take()
            waiting -= not account.is_waiting
        account.end_turns(1)
        circle.rotate(-1)
        if waiting and fruitless >= len(circle):
            _pass_over_fruitless_rounds(circle)
            fruitless = 0
    return _state(circle)


class _Account(Generic[Item]):
    """A tenant's deficit while turns are taken, and the first of its items that are left."""

    def __init__(self, tenant: str, items: Iterable[Item], quantum: float, deficit: float) -> None:
        self.tenant = tenant
        self.quantum = quantum
        self.deficit = deficit
        self.is_put_off = False
        self._items = iter(items)
        self.head = next(self._items, None)

    @property
    def is_waiting(self) -> bool:
        """True while the tenant may be offered another item."""
        return self.head is not None and not self.is_put_off

    def take(self) -> None:
        """Charge the first item and go on to the next."""
        if self.head is not None:
            self.deficit -= self.head.cost
            self.head = next(self._items, None)

    def end_turns(self, turns: int) -> None:
        """Add the quanta of the next turns. The deficit of a tenant without items is cut to one quantum."""
        if self.head is None:
            self.deficit = self.quantum
        elif not self.is_put_off:
            self.deficit += turns * self.quantum

    def turns_missing(self) -> int:
        """Return the number of turns until the deficit covers the next item."""
        return math.ceil((self.head.cost - self.deficit) / self.quantum) if self.head is not None else 0


def _circle(
    items: Mapping[str, Iterable[Item]], fairness: Fairness, quanta: Mapping[str, float]
) -> deque[_Account[Item]]:
    """Return an account for each tenant in the order of turns; tenants that join now come first."""
    joining = [tenant for tenant in items if tenant not in fairness.deficits]
    accounts: deque[_Account[Item]] = deque()
    for tenant in (*joining, *fairness.turn):
        # A tenant out of work has no quantum. Its place stays taken until its turn comes.
        quantum = quanta.get(tenant, 0.0)
        accounts.append(_Account(tenant, items.get(tenant, ()), quantum, fairness.deficits.get(tenant, quantum)))
    return accounts


def _state(circle: Iterable[_Account[Item]]) -> Fairness:
    accounts = list(circle)
    return Fairness(
        deficits=MappingProxyType({account.tenant: account.deficit for account in accounts}),
        turn=tuple(account.tenant for account in accounts),
    )


def _pass_over_fruitless_rounds(circle: Iterable[_Account[Item]]) -> None:
    """Skip the rounds in which no deficit covers an item, at once, however small the quanta are."""
    waiting = [account for account in circle if account.is_waiting]
    rounds = min(account.turns_missing() for account in waiting)
    for account in waiting:
        account.end_turns(max(rounds, 0))
