"""How many tokens of prompts a server has to compute at a time."""

import asyncio


class PaceTurn:
    """Tokens that count until ``end``, which may be called again."""

    def __init__(self, pace: "TokenPace", tokens: int) -> None:
        self._pace = pace
        self._tokens = tokens

    def end(self) -> None:
        """They are computed, or never will be."""
        self._pace.release(self._tokens)
        self._tokens = 0


class TokenPace:
    """At most ``limit`` tokens at a time (None: any number), first come, first served; what is more goes alone."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._held = 0
        self._freed = asyncio.Event()
        self._queue = asyncio.Lock()

    async def turn(self, tokens: int) -> PaceTurn:
        """Wait for a place for ``tokens``."""
        if self._limit is not None:
            async with self._queue:
                while self._held and self._held + tokens > self._limit:
                    self._freed.clear()
                    await self._freed.wait()
                self._held += tokens
        return PaceTurn(self, tokens if self._limit is not None else 0)

    def release(self, tokens: int) -> None:
        """Give up places."""
        self._held -= tokens
        self._freed.set()
