"""Turns by time between owners with few sequences and owners with many, for a replica on a CPU.

A CPU computes a step row by row, so a sequence in a full batch waits for all other rows before each of its tokens. Owners
that hold few sequences beside one that holds many therefore decode in a batch of their own. The two groups take turns: each
gets the time that its owners' shares entitle it to. An accelerator computes many rows in the time of one, and keeps all
sequences in one batch.

Bound: while both groups have work, the time that each got, divided by its shares, differs by less than the longest turn of
either, divided by its group's shares. What a group that comes has waited for the turn under way is time that the other one got.
"""

from collections.abc import Mapping
from enum import Enum

_FEW = 8
"""An owner has few sequences while another one has so many times as many."""
_STILL_FEW = 4
"""The same for an owner that has decoded apart, so that it does not move to and fro."""


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
        self._spent = dict.fromkeys(Group, 0.0)
        self._present: frozenset[Group] = frozenset()
        """Groups that had work at the last choice."""

    def choose(self, shares: Mapping[Group, float], *, waited: float = 0.0) -> Group | None:
        """Return the next group, None without work. ``shares`` are the sums of the groups that have work.

        The time that a group computes alone counts for nothing once the other one comes, but for the ``waited`` seconds since
        then.
        """
        before, self._present = self._present, frozenset(shares)
        if len(before) < len(Group) or len(shares) < len(Group):
            self._spent = {group: waited / shares[group] if self._is_joined(group, before) else 0.0 for group in Group}
        return min(shares, key=lambda group: (self._spent[group], group is Group.MANY), default=None)

    def _is_joined(self, group: Group, before: frozenset[Group]) -> bool:
        """Return whether the other group has come to ``group``, which had work ``before``."""
        return before == {group} and self._present == frozenset(Group)

    def charge(self, group: Group, seconds: float, shares: float) -> None:
        """Count a turn of ``seconds`` to the group, whose shares have the sum ``shares``."""
        self._spent[group] += seconds / shares
