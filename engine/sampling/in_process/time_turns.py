"""Turns by time between owners with few sequences and owners with many, for a replica on a CPU.

A CPU computes a step row by row, so a sequence in a full batch waits for all other rows before each of its tokens. Owners
that hold few sequences beside one that holds many therefore decode in a batch of their own. The two groups take turns: each
gets the time that its owners' shares entitle it to. An accelerator computes many rows in the time of one, and keeps all
sequences in one batch.

Bound: while both groups have work, the time that each got, divided by its shares, differs by less than the longest turn of
either, divided by its group's shares. Owners of few sequences that come back are ahead by the time that they left to the
many, ``CREDIT_SECONDS`` at most. So a sample after a pause goes first, and no pause is long enough to stop the many for more.
The many have no such credit: they would stop the few each time they come.
"""

from collections.abc import Collection, Mapping
from enum import Enum
from math import inf

_FEW = 8
"""An owner has few sequences while another one has so many times as many."""
_STILL_FEW = 4
"""The same for an owner that has decoded apart, so that it does not move to and fro."""
CREDIT_SECONDS = 1.0
"""Most seconds, for one share, that owners of few sequences are ahead after a time in which they had no work."""


class Group(Enum):
    """Owners that decode in one batch."""

    FEW = "few"
    MANY = "many"


class Division:
    """Division of the owners into the two groups, by the sequences that each holds."""

    def __init__(self, *, divides: bool) -> None:
        """Without ``divides`` every owner stays in ``Group.MANY``."""
        self._divides = divides
        self._few: frozenset[str] = frozenset()

    def renew(self, held: Mapping[str, int]) -> bool:
        """Divide the owners anew, and tell whether that changed anything. ``held`` are the sequences of each."""
        if not self._divides:
            return False
        before, most = self._few, max(held.values(), default=0)
        self._few = frozenset(
            owner
            for owner, number in held.items()
            if number and number * (_STILL_FEW if owner in before else _FEW) <= most
        )
        return self._few != before

    def group_of(self, owner: str) -> Group:
        """Return the owner's group."""
        return Group.FEW if owner in self._few else Group.MANY


class TimeTurns:
    """Choice of the group whose turn it is: the one that got the least time for its shares."""

    def __init__(self) -> None:
        self._owed = 0.0
        """Seconds, divided by the shares, that the many got more than the few."""

    def choose(self, groups: Collection[Group]) -> Group | None:
        """Return the next of the ``groups`` that have work, None without any. Where both got as much, the few go first."""
        if len(groups) == 1:
            return next(iter(groups))
        if not groups:
            return None
        return Group.FEW if self._owed >= 0 else Group.MANY

    def charge(self, group: Group, seconds: float, shares: Mapping[Group, float]) -> None:
        """Count a turn of ``seconds`` to the group. ``shares`` are the sums of the groups that had work in it."""
        used, is_alone = seconds / shares[group], len(shares) == 1
        if group is Group.FEW:
            self._owed -= used
            if is_alone:
                self._owed = max(0.0, self._owed)
        else:
            # The turn under way when the few come is owed to them whole, however long it took.
            most = max(CREDIT_SECONDS, used) if is_alone else inf
            self._owed = min(self._owed + used, most)
