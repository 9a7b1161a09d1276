"""Token feeds between processes, over Redis: carry a sample's tokens from the process that samples to those that stream them.

Tokens are sent only while a process follows the sample. Tokens that Redis drops are still in the sample's result.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import msgspec
from redis.asyncio import Redis

from ledger.token_feed import FeedKey, TokenFeed, TokensMade
from store.repeat import repeat
from workers.cluster.redis_channel import RedisChannel

log = logging.getLogger(__name__)

_TOLD_AGAIN_SECONDS = 5.0
_FORGOTTEN_SECONDS = 3 * _TOLD_AGAIN_SECONDS
_MOST_MISSED = 100_000
"""Most sequences to publish again that are remembered; another process may draw them."""
_MOST_SEQUENCES = 1024
"""Sequences that are published again for a follower that does not tell which tokens it has."""
_FOLLOWS_AT_ONCE = 256
"""Most samples in one message of what a process follows."""
PART_BYTES = 16 * 1024
"""Most bytes of a message with more than one token."""


class _Made(msgspec.Struct):
    """Tokens of one sample."""

    lane: str
    seq_id: int
    made: list[TokensMade]


class _Follows(msgspec.Struct):
    """Samples that the sending process follows."""

    keys: list[FeedKey]


class _Message(msgspec.Struct):
    """One message: ``made``, ``follows`` or ``missed``, the sample whose tokens a follower has missed in part.

    ``heard`` are the tokens that the follower has of each sequence with a gap; None: a process of an earlier version asks.
    """

    made: _Made | None = None
    follows: _Follows | None = None
    missed: FeedKey | None = None
    heard: dict[int, int] | None = None


class RedisTokenFeed(TokenFeed):
    """Followers of samples in all processes. A follower gets the tokens made after other processes heard of it."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        """Use the channel of ``namespace``, which keeps services apart that share a Redis."""
        super().__init__()
        self._channel = RedisChannel(redis, f"{namespace}:tokens", self._receive, self._changed)
        #: End of each sample's following by other processes, on the monotonic clock.
        self._followed: dict[FeedKey, float] = {}
        self._change = asyncio.Event()
        self._missed_count = 0
        """Sequences that were asked for since the asked ones were last forgotten."""

    @contextmanager
    def follow(self, key: FeedKey) -> Iterator[asyncio.Queue[Sequence[TokensMade]]]:
        """See ``TokenFeed``."""
        with super().follow(key) as queue:
            self._send(_Message(follows=_Follows([key])))
            yield queue

    def is_followed(self, key: FeedKey) -> bool:
        """See ``TokenFeed``."""
        return super().is_followed(key) or self._followed.get(key, 0.0) > monotonic()

    def publish(self, key: FeedKey, made: Sequence[TokensMade]) -> None:
        """See ``TokenFeed``."""
        super().publish(key, made)
        if self._followed.get(key, 0.0) > monotonic() and made:
            self._send_made(key, list(made))

    def ask_again(self, key: FeedKey, heard: Mapping[int, int]) -> None:
        """See ``TokenFeed``."""
        super().ask_again(key, heard)
        self._send(_Message(missed=key, heard=dict(heard)))

    async def run(self) -> None:
        """Send and receive until cancelled."""
        telling = repeat(
            self._tell_again,
            seconds=_TOLD_AGAIN_SECONDS,
            wake=self._change,
            failed="followed samples could not be told",
        )
        await asyncio.gather(self._channel.run(), telling)

    def _send(self, message: _Message) -> None:
        self._channel.send(msgspec.json.encode(message))

    def _send_made(self, key: FeedKey, made: list[TokensMade]) -> None:
        """Send the tokens, in halves if they are too many for one message."""
        part = msgspec.json.encode(_Message(made=_Made(key[0], key[1], made)))
        if len(part) > PART_BYTES and sum(len(one.tokens) for one in made) > 1:
            for half in _halves(made):
                self._send_made(key, half)
        else:
            self._channel.send(part)

    def _receive(self, part: bytes) -> None:
        try:
            message = msgspec.json.decode(part, type=_Message)
        except msgspec.DecodeError as error:
            log.warning("a message about streamed tokens cannot be read: %s", error)
            return
        if message.made is not None:
            super().publish((message.made.lane, message.made.seq_id), message.made.made)
        if message.missed is not None and self._missed_count < _MOST_MISSED:
            heard = dict.fromkeys(range(_MOST_SEQUENCES), 0) if message.heard is None else message.heard
            self._missed_count += len(heard)
            super().ask_again(message.missed, heard)
        if message.follows is not None:
            for lane, seq_id in message.follows.keys:
                self._followed[(lane, seq_id)] = monotonic() + _FORGOTTEN_SECONDS

    def _changed(self, is_through: bool) -> None:
        if is_through:
            self._change.set()

    async def _tell_again(self) -> None:
        """Tell other processes which samples this process follows, and forget followers that have not told again in time."""
        now = monotonic()
        self._followed = {key: ends for key, ends in self._followed.items() if ends > now}
        # Samples that are drawn elsewhere, or have ended. Whoever misses tokens still asks again.
        self._missed.clear()
        self._missed_count = 0
        keys = self.followed_here()
        for start in range(0, len(keys), _FOLLOWS_AT_ONCE):
            self._send(_Message(follows=_Follows(keys[start : start + _FOLLOWS_AT_ONCE])))


def _halves(made: list[TokensMade]) -> tuple[list[TokensMade], list[TokensMade]]:
    """Return the two halves of more than one token."""
    if len(made) > 1:
        middle = len(made) // 2
        return made[:middle], made[middle:]
    (whole,) = made
    middle = len(whole.tokens) // 2
    first = replace(whole, tokens=whole.tokens[:middle], logprobs=whole.logprobs[:middle])
    start, tokens, logprobs = whole.start + middle, whole.tokens[middle:], whole.logprobs[middle:]
    return [first], [replace(whole, start=start, tokens=tokens, logprobs=logprobs)]
