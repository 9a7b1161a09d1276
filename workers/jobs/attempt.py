"""An attempt at a job, while it is in hand."""

import asyncio
from dataclasses import dataclass, field
from time import monotonic

from tenants.taken_jobs import TakenJob


class AttemptEnds(Exception):
    """The work of an attempt ends before it is done."""


@dataclass
class Attempt:
    """An attempt at a job, between the work and the loop that renews the lease."""

    job: TakenJob
    done: int = 0
    total: int = 0
    moved: float | None = None
    """Time of the last progress; None while no work is under way."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the work is to end before it is done."""
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the work is done and the database has not taken its record."""
    is_stalled: bool = False
    """True once the work is given up, since it makes no progress."""

    def progress(self, done: int, total: int) -> None:
        """Take note of the progress."""
        self.done, self.total, self.moved = done, total, monotonic()
