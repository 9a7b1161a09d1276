"""Feed of samples' tokens while they are drawn, from the sampler to streamed answers in the same process.

The feed stores nothing. The recorded result has every token.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FeedKey = tuple[str, int]
"""Lane and seq_id of a sample: known before its operation is recorded."""


@dataclass(frozen=True, slots=True)
class TokensMade:
    """New tokens of one sequence, all drawn from one version.

    ``start`` is the number of tokens published before, except after a restart of the sample: then it is smaller, and
    these tokens replace the earlier ones from ``start`` on.
    """

    sequence: int
    start: int
    """Index of the first of ``tokens`` in the sequence."""
    version: str | None
    """None: the bare base."""
    tokens: list[int]
    logprobs: list[float]
    """Natural logarithms, one for each of ``tokens``."""


class TokenFeed:
    """Queues of the followers of each sample. Used from one event loop."""

    def __init__(self) -> None:
        self._followers: dict[FeedKey, list[asyncio.Queue[Sequence[TokensMade]]]] = {}

    @contextmanager
    def follow(self, key: FeedKey) -> Iterator[asyncio.Queue[Sequence[TokensMade]]]:
        """Yield a queue of everything published for the sample from now on, at most one entry for each of its tokens."""
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
        """Return the keys of the samples that are followed in this process."""
        return list(self._followers)

    def is_followed(self, key: FeedKey) -> bool:
        """Return whether the sample has followers."""
        return key in self._followers

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        """Put ``made`` into the queue of each follower of the sample."""
        for queue in self._followers.get(key, ()):
            queue.put_nowait(made)
