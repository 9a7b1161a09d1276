"""Tokens of samples as they are made, for those who stream them inside one process. Nothing is kept: the result is the truth."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FeedKey = tuple[str, int]
"""Lane and seq_id: known before the operation is."""


@dataclass(frozen=True, slots=True)
class TokensMade:
    """Tokens of one sequence from place ``start`` on, of one version (None: the bare base); ``logprobs`` of the same length.

    They follow those told before, except when the sample was begun again: then they take their place.
    """

    sequence: int
    start: int
    version: str | None
    tokens: list[int]
    logprobs: list[float]


class TokenFeed:
    """Who follows which sample. Used from one event loop."""

    def __init__(self) -> None:
        self._followers: dict[FeedKey, list[asyncio.Queue[Sequence[TokensMade]]]] = {}

    @contextmanager
    def follow(self, key: FeedKey) -> Iterator[asyncio.Queue[Sequence[TokensMade]]]:
        """All that is published from now on. A sample has at most as many entries as tokens, so the queue is bounded."""
        queue: asyncio.Queue[Sequence[TokensMade]] = asyncio.Queue()
        self._followers.setdefault(key, []).append(queue)
        try:
            yield queue
        finally:
            followers = self._followers[key]
            followers.remove(queue)
            if not followers:
                del self._followers[key]

    def followed_here(self) -> list[FeedKey]:
        """Every sample that is followed in this process."""
        return list(self._followers)

    def is_followed(self, key: FeedKey) -> bool:
        """Whether publishing reaches anybody."""
        return key in self._followers

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        """Hand ``made`` to the sample's followers."""
        for queue in self._followers.get(key, ()):
            queue.put_nowait(made)
