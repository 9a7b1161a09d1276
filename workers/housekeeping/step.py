"""A step of housekeeping: work in small batches, each in a transaction of its own."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from workers.housekeeping.schedule import StepName

SMALL, LARGE = 100, 500
"""Most rows of a batch: where each may bring a folder or a whole lane with it, and elsewhere."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Outcome of one batch: rows deleted or changed, and where the next batch begins. ``next`` None: nothing is left."""

    handled: int
    next: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A named piece of housekeeping.

    ``work`` does one batch. It is given the place at which the batch before ended, None at the beginning.
    """

    name: StepName
    work: Callable[[str | None], Awaitable[Batch]]


def again(handled: int, most: int) -> Batch:
    """Return the outcome of a batch that takes what is due first: more may be due after ``most`` rows, nothing after less."""
    return Batch(handled, "more" if handled >= most else None)
