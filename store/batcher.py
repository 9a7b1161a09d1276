"""Many callers' questions in one go: what is asked while a round runs goes into the next one.

A round begins after each of its questions was asked, so an answer is never older than its question: nothing is cached.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from itertools import repeat
from typing import Generic, TypeVar

from contracts.errors import WeftError

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")

MOST = 128
"""Questions of one round: bounds how long one statement, and what follows each answer, keeps the event loop."""


class Batcher(Generic[Q, A]):
    """Answers questions in rounds, one round at a time. Used from one event loop."""

    def __init__(self, work: Callable[[Sequence[Q]], Awaitable[Sequence[A | WeftError]]], *, most: int = MOST) -> None:
        """``work`` answers every question of a round, in order; an answer that is an error is raised to who asked.

        What it raises itself, everybody is told when it is a ``WeftError``, such as ``Unavailable``. After anything
        else each question is tried alone: one that can never be answered must not take others' down with it.
        """
        self._work = work
        self._most = most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._rounds: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """The answer. Raises what the work does, and what it answers."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._rounds is None:
            # Of no caller's own context: what it logs is about many.
            self._rounds = asyncio.create_task(self._run(), name="batcher", context=Context())
        return await answer

    async def settle(self) -> None:
        """Wait until no round runs: one goes on when all who asked have left."""
        while self._rounds is not None:
            await asyncio.wait([self._rounds])

    async def _run(self) -> None:
        try:
            while self._waiting:
                current, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                # Who has left needs no answer.
                current = [one for one in current if not one[1].done()]
                if current:
                    await self._round(current)
        finally:
            self._rounds = None
            abandoned, self._waiting = self._waiting, []
            for _, answer in abandoned:
                answer.cancel()

    async def _round(self, current: Sequence[tuple[Q, "asyncio.Future[A]"]]) -> None:
        try:
            found: Sequence[A | Exception] = await self._work([question for question, _ in current])
        except WeftError as error:
            found = [error] * len(current)
        except Exception as error:  # noqa: BLE001 - who asked is told
            if len(current) > 1:
                for one in current:
                    await self._round([one])
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
    """``values``, the last one repeated up to a power of two: each length of an ``IN`` is a statement of its own."""
    if not values:
        return []
    wanted = 1 << (len(values) - 1).bit_length()
    return [*values, *repeat(values[-1], wanted - len(values))]
