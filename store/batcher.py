"""Batching of concurrent calls: many callers' questions are answered by one call of ``work``.

Questions that arrive while a batch runs go into the next batch. Nothing is cached: a batch begins after all of its
questions were asked, so no answer is older than its question.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from itertools import accumulate, repeat, takewhile
from typing import Generic, TypeVar

from contracts.errors import WeftError

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")

MOST = 128
"""Most questions of a batch: bounds the time for which one batch occupies the event loop."""


class Batcher(Generic[Q, A]):
    """Answers questions in batches, one batch at a time. Used from one event loop."""

    def __init__(
        self,
        work: Callable[[Sequence[Q]], Awaitable[Sequence[A | WeftError]]],
        *,
        most: int = MOST,
        size: Callable[[Q], int] = lambda _: 1,
    ) -> None:
        """``work`` returns one answer for each question of a batch, in order.

        Questions whose ``size`` is at most ``most`` together make a batch; a larger one is a batch of its own.

        - An answer that is a ``WeftError`` is raised to the caller who asked.
        - A ``WeftError`` that ``work`` raises, such as ``Unavailable``, is raised to every caller of the batch.
        - After any other exception each question is asked alone, so that one bad question fails only its own caller.
        """
        self._work = work
        self._most = most
        self._size = size
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Return the batch's answer to ``question``; raise its error."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._running is None:
            # An empty context: the log lines of a batch belong to no single caller.
            self._running = asyncio.create_task(self._run(), name="batcher", context=Context())
        return await answer

    async def settle(self) -> None:
        """Wait until no batch runs; a batch goes on after its callers were cancelled."""
        while self._running is not None:
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        try:
            while self._waiting:
                number = self._next()
                current, self._waiting = self._waiting[:number], self._waiting[number:]
                # Cancelled callers need no answer.
                current = [one for one in current if not one[1].done()]
                if current:
                    await self._answer(current)
        finally:
            self._running = None
            abandoned, self._waiting = self._waiting, []
            for _, answer in abandoned:
                answer.cancel()

    def _next(self) -> int:
        """Return how many of the waiting questions make the next batch."""
        sizes = accumulate(self._size(question) for question, _ in self._waiting)
        return max(1, sum(1 for _ in takewhile(lambda size: size <= self._most, sizes)))

    async def _answer(self, current: Sequence[tuple[Q, "asyncio.Future[A]"]]) -> None:
        try:
            found: Sequence[A | Exception] = await self._work([question for question, _ in current])
        except WeftError as error:
            found = [error] * len(current)
        except Exception as error:  # noqa: BLE001 - raised to the callers
            if len(current) > 1:
                for one in current:
                    await self._answer([one])
                return
            found = [error]
        except BaseException:
            for _, answer in current:
                answer.cancel()
            raise
        for (_, answer), outcome in zip(current, found, strict=True):
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)


def few_lengths(values: Sequence[T]) -> list[T]:
    """Return ``values`` with the last one repeated up to a power of two.

    Each length of an ``IN`` list is a statement of its own to the database, so few lengths mean few statements.
    """
    if not values:
        return []
    wanted = 1 << (len(values) - 1).bit_length()
    return [*values, *repeat(values[-1], wanted - len(values))]
