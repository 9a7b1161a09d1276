"""Tokens of samples as they are made, from the process that samples to the one whose client follows."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic

import msgspec
from redis.asyncio import Redis

from ledger.token_feed import FeedKey, TokenFeed, TokensMade
from workers.cluster.redis_wakeups import RedisChannel

log = logging.getLogger(__name__)

_TOLD_AGAIN_SECONDS = 5.0
_FORGOTTEN_SECONDS = 3 * _TOLD_AGAIN_SECONDS


class _Made(msgspec.Struct):
    """Tokens of one sample."""

    lane: str
    seq_id: int
    made: list[TokensMade]


class _Follows(msgspec.Struct):
    """Somebody elsewhere follows these samples."""

    keys: list[FeedKey]


class _Message(msgspec.Struct):
    """One of both."""

    made: _Made | None = None
    follows: _Follows | None = None


class RedisTokenFeed(TokenFeed):
    """Who follows which sample, here and elsewhere. A follower that begins late gets what is made from then on."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        """As for ``RedisWakeups``."""
        super().__init__()
        self._channel = RedisChannel(redis, f"{namespace}:tokens", self._take, self._changed)
        self._followed: dict[FeedKey, float] = {}
        self._change = asyncio.Event()

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
            self._send(_Message(made=_Made(key[0], key[1], list(made))))

    async def run(self) -> None:
        """Send and receive until cancelled."""
        await asyncio.gather(self._channel.run(), self._tell_again())

    def _send(self, message: _Message) -> None:
        self._channel.send(msgspec.json.encode(message))

    def _take(self, part: bytes) -> None:
        message = msgspec.json.decode(part, type=_Message)
        if message.made is not None:
            super().publish((message.made.lane, message.made.seq_id), message.made.made)
        if message.follows is not None:
            for lane, seq_id in message.follows.keys:
                self._followed[(lane, seq_id)] = monotonic() + _FORGOTTEN_SECONDS

    def _changed(self, is_through: bool) -> None:
        if is_through:
            self._change.set()

    async def _tell_again(self) -> None:
        while True:
            self._change.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_TOLD_AGAIN_SECONDS):
                    await self._change.wait()
            now = monotonic()
            self._followed = {key: ends for key, ends in self._followed.items() if ends > now}
            if keys := self.followed_here():
                self._send(_Message(follows=_Follows(keys)))
