"""Turns on an accelerator: passes and scores of one process take turns, so they need the largest one's memory, not the sum."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceTurns:
    """One turn at a time, first come first served; without ``one_at_a_time``, as on a CPU, turns do not wait. For any thread.

    A training pass takes a turn for each of its micro-batches. So a score beside it waits for one micro-batch at most, and the
    pass for one micro-batch of scores. A plain lock would go back to the thread that has just let it go.
    """

    def __init__(self, *, one_at_a_time: bool) -> None:
        self._one_at_a_time = one_at_a_time
        self._changed = threading.Condition()
        self._asked = self._done = 0

    @property
    def waiting(self) -> int:
        """Number of threads that wait for their turn."""
        with self._changed:
            return max(0, self._asked - self._done - 1)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn and have it for the context."""
        if not self._one_at_a_time:
            yield
            return
        with self._changed:
            number, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._done == number)
        try:
            yield
        finally:
            with self._changed:
                self._done += 1
                self._changed.notify_all()
