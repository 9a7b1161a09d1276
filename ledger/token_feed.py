"""Feed of samples' tokens while they are drawn, from the sampler to streamed answers in the same process.

The feed stores nothing. The recorded result has every token.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

FeedKey = tuple[str, int]
"""Lane and seq_id of a sample: known before its operation is recorded."""


@dataclass(frozen=True, slots=True)
class TokensMade:
    """New tokens of one sequence, all drawn from one version.

    ``start`` is mostly the number of tokens published before. It is smaller when tokens are published again, because a
    follower missed some, and after a restart: then these tokens replace the earlier ones.
    """

    sequence: int
    start: int
    """Index of the first of ``tokens`` in the sequence."""
    version: str | None
    """None: the bare base."""
    tokens: list[int]
    logprobs: list[float]
    """Natural logarithms, one for each of ``tokens``."""
    restarts: int = 0
    """Times that the sample was begun anew."""
    claim: int = 0
    """Fencing token of the claim under which they were drawn; 0: not told by a process of a version before."""
    publication: int | None = None
    """Publication that the sample's first token was drawn from; None: not told by a process of a version before."""


class TokenFeed:
    """Queues of the followers of each sample. Used from one event loop."""

    def __init__(self) -> None:
        self._followers: dict[FeedKey, list[asyncio.Queue[Sequence[TokensMade]]]] = {}
        self._missed: dict[FeedKey, dict[int, int]] = {}

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
                self._missed.pop(key, None)

    def followed_here(self) -> list[FeedKey]:
        """Return the keys of the samples that are followed in this process."""
        return list(self._followers)

    def is_followed(self, key: FeedKey) -> bool:
        """Return whether the sample has followers."""
        return key in self._followers

    def ask_again(self, key: FeedKey, heard: Mapping[int, int]) -> None:
        """Have the sampler publish again what a follower has missed of the sample.

        ``heard`` are the tokens that the follower has of each sequence with a gap. What follows them is published.
        """
        missed = self._missed.setdefault(key, {})
        for sequence, count in heard.items():
            missed[sequence] = min(count, missed.get(sequence, count))

    def take_asked_again(self, key: FeedKey) -> Mapping[int, int]:
        """Return the fewest tokens that a follower has of each sequence with a gap, once for each time that it asked."""
        return self._missed.pop(key, {})

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        """Put ``made`` into the queue of each follower of the sample."""
        for queue in self._followers.get(key, ()):
            queue.put_nowait(made)
