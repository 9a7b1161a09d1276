"""Token feed: passes on sampled tokens as they are drawn, for streamed answers inside one process.

Nothing is stored. The operation's result has every token.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FeedKey = tuple[str, int]
"""Lane and seq_id of a sample, which are known before its request id."""


@dataclass(frozen=True, slots=True)
class TokensMade:
    """New tokens of one sequence, drawn from one version (None: the bare base), with as many ``logprobs``.

    ``start`` is the index of the first one. When a sample begins again, ``start`` goes back and later tokens are replaced.
    """

    sequence: int
    start: int
    version: str | None
    tokens: list[int]
    logprobs: list[float]


class TokenFeed:
    """Followers of samples. Used from one event loop."""

    def __init__(self) -> None:
        self._followers: dict[FeedKey, list[asyncio.Queue[Sequence[TokensMade]]]] = {}

    @contextmanager
    def follow(self, key: FeedKey) -> Iterator[asyncio.Queue[Sequence[TokensMade]]]:
        """Open a queue of the sample's tokens published from now on. It holds at most one entry for each token."""
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
        """Return every sample that is followed in this process."""
        return list(self._followers)

    def is_followed(self, key: FeedKey) -> bool:
        """Return True if the sample has a follower."""
        return key in self._followers

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        """Hand ``made`` to the sample's followers."""
        for queue in self._followers.get(key, ()):
            queue.put_nowait(made)
