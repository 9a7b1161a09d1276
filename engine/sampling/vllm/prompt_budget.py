"""Limits how many prompt tokens a vLLM server has to prefill at a time, so that prompts do not delay running sequences."""

import asyncio


class Reservation:
    """Tokens that count against a ``PromptBudget`` until ``release``."""

    def __init__(self, budget: "PromptBudget", tokens: int) -> None:
        self._budget = budget
        self._tokens = tokens

    def release(self) -> None:
        """Return the tokens to the budget. Safe to repeat."""
        self._budget.add(self._tokens)
        self._tokens = 0


class PromptBudget:
    """At most ``limit`` reserved tokens at a time (None: any number), first come, first served.

    A prompt longer than the limit is admitted when nothing else is reserved.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._reserved = 0
        self._released = asyncio.Event()
        self._queue = asyncio.Lock()

    async def reserve(self, tokens: int) -> Reservation:
        """Wait until ``tokens`` fit into the budget, and reserve them."""
        if self._limit is not None:
            async with self._queue:
                while self._reserved and self._reserved + tokens > self._limit:
                    self._released.clear()
                    await self._released.wait()
                self._reserved += tokens
        return Reservation(self, tokens if self._limit is not None else 0)

    def add(self, tokens: int) -> None:
        """Return ``tokens`` that were reserved."""
        self._reserved -= tokens
        self._released.set()
