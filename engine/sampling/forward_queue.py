"""Questions that wait for a trainer's forward: those of handshakes first, and none whose asker has left."""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.errors import WeftError

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Asked(Generic[Q, A]):
    """A question and the future that its asker awaits; cancelling the future takes the question back."""

    question: Q
    answer: "asyncio.Future[A]"

    def end(self, outcome: A | WeftError) -> None:
        """Give the asker ``outcome``, unless the asker has left."""
        if self.answer.done():
            return
        if isinstance(outcome, WeftError):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class ForwardQueue(Generic[Q, A]):
    """Questions in order of arrival, after those that were put first. Used from one event loop."""

    def __init__(self) -> None:
        self._first: deque[Asked[Q, A]] = deque()
        self._others: deque[Asked[Q, A]] = deque()

    def put(self, question: Q, *, first: bool) -> "asyncio.Future[A]":
        """Add a question, with ``first`` before all that were put without, and return the future of its answer."""
        asked: Asked[Q, A] = Asked(question, asyncio.get_running_loop().create_future())
        (self._first if first else self._others).append(asked)
        return asked.answer

    def next(self) -> Asked[Q, A] | None:
        """Return the next question that has an asker, without taking it; None when none waits."""
        for waiting in (self._first, self._others):
            while waiting:
                if not waiting[0].answer.done():
                    return waiting[0]
                waiting.popleft()
        return None

    def take(self) -> Asked[Q, A] | None:
        """Take the next question that has an asker; None when none waits."""
        asked = self.next()
        if asked is not None:
            (self._first if self._first else self._others).popleft()
        return asked

    def fail(self, error: WeftError) -> None:
        """End every question with ``error``."""
        while (asked := self.take()) is not None:
            asked.end(error)
