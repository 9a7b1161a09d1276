"""Wake-ups and token feeds between processes, over Redis. Nothing is kept there: what is lost is found by looking again.

One channel carries topics, many in a message when many come at once; another carries tokens of samples that somebody
follows. While Redis cannot be reached every listener is woken twice a second and looks at the database, which has the truth.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ledger.wakeups import PLACEMENTS, Wakeups

log = logging.getLogger(__name__)

NET_SECONDS = 10.0
"""Time between two looks of everybody at the truth while all is well."""
OUTAGE_SECONDS = 0.5
"""The same while Redis cannot be reached."""
_TOLD_AT_ONCE = 32
_BETWEEN_TURNS_SECONDS = 0.05
_SOCKET_SECONDS = 5.0
_SILENCE_SECONDS = 2.0
_PROBE = b""
_PROBE_SECONDS = 1.0
_DEAF_SECONDS = 3.0
"""Without a word of its own for so long, a process takes messages for lost."""
_MOST_KEPT = 4096

Receive = Callable[[bytes], None]


def open_redis(url: str) -> Redis:
    """A client with bounded waits."""
    return Redis.from_url(
        url, socket_connect_timeout=_SOCKET_SECONDS, socket_timeout=_SOCKET_SECONDS, health_check_interval=30
    )


class RedisChannel:
    """One channel: what others publish is handed to ``receive``; what is sent in one moment goes out in one message."""

    def __init__(self, redis: Redis, name: str, receive: Receive, on_change: Callable[[bool], None]) -> None:
        """``on_change`` hears whether messages come through, whenever that changes."""
        self._redis = redis
        self._name = name
        self._receive = receive
        self._on_change = on_change
        self._sender = uuid4().hex[:16].encode()
        self._outgoing: dict[bytes, None] = {}
        self._added = asyncio.Event()
        self._heard = float("-inf")
        self._is_through = False

    def send(self, part: bytes) -> None:
        """Have ``part``, which has no line break, told to all other processes soon, once."""
        self._outgoing[part] = None
        self._added.set()

    async def run(self) -> None:
        """Send and receive until cancelled."""
        await asyncio.gather(self._publish(), self._listen(), self._probe())

    async def _probe(self) -> None:
        """Messages come through while this process hears its own: connections may stand to a server that stands still."""
        while True:
            self.send(_PROBE)
            await asyncio.sleep(_PROBE_SECONDS)
            if monotonic() - self._heard > _DEAF_SECONDS:
                self._note(is_through=False)

    def _note(self, *, is_through: bool) -> None:
        if is_through != self._is_through:
            self._is_through = is_through
            self._on_change(is_through)

    async def _publish(self) -> None:
        while True:
            await self._added.wait()
            self._added.clear()
            parts, self._outgoing = list(self._outgoing), {}
            try:
                await self._redis.publish(self._name, b"\n".join([self._sender, *parts]))
            except (RedisError, OSError) as error:
                log.debug("%d parts on %s are sent again: %s", len(parts), self._name, error)
                self._keep(parts)
                await asyncio.sleep(OUTAGE_SECONDS)
            except Exception:
                log.exception("%d parts on %s are sent again", len(parts), self._name)
                self._keep(parts)
                await asyncio.sleep(OUTAGE_SECONDS)

    def _keep(self, parts: list[bytes]) -> None:
        """For the next message, as far as they are few: the net finds what the others were about."""
        self._outgoing = dict.fromkeys([*parts, *self._outgoing][:_MOST_KEPT])
        self._added.set()

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                    await pubsub.subscribe(self._name)
                    self.send(_PROBE)
                    while True:
                        message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
                        if message is not None:
                            self._take(message["data"])
            except (RedisError, OSError) as error:
                log.warning("Redis cannot be reached: %s", error)
            except Exception:
                log.exception("messages on %s cannot be read", self._name)
            self._note(is_through=False)
            await asyncio.sleep(OUTAGE_SECONDS)

    def _take(self, message: bytes) -> None:
        sender, *parts = message.split(b"\n")
        if sender == self._sender:
            self._heard = monotonic()
            self._note(is_through=True)
            return
        for part in parts:
            if part != _PROBE:
                self._receive(part)


class RedisWakeups(Wakeups):
    """Topics and listeners of many processes. Placements stay in the process: a queue tells one trainer of each."""

    def __init__(self, redis: Redis, namespace: str) -> None:
        """Services that share a Redis tell each other apart by ``namespace``."""
        super().__init__()
        self._channel = RedisChannel(redis, f"{namespace}:wakeups", self._take, self._changed)
        self._is_through = False
        self._change = asyncio.Event()

    @property
    def is_through(self) -> bool:
        """Whether other processes' wake-ups come through."""
        return self._is_through

    def announce(self, topic: str) -> None:
        """Wake the listeners of ``topic``, here and, a little later, elsewhere."""
        super().announce(topic)
        if not topic.startswith(PLACEMENTS):
            self._channel.send(topic.encode())

    async def run(self) -> None:
        """Send and receive until cancelled."""
        await asyncio.gather(self._channel.run(), self._net())

    def _take(self, part: bytes) -> None:
        super().announce(part.decode())

    def _changed(self, is_through: bool) -> None:
        self._is_through = is_through
        self._change.set()

    async def _net(self) -> None:
        told = monotonic()
        while True:
            self._change.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(OUTAGE_SECONDS if not self._is_through else NET_SECONDS):
                    await self._change.wait()
            log.debug("everybody looks, %.1f s after the last time", monotonic() - told)
            told = monotonic()
            if self._is_through:
                await self._tell_in_turn()
            else:
                self.announce_all()

    async def _tell_in_turn(self) -> None:
        """Wake everybody a few at a time: of a thousand polls that look at once each waits for all the others."""
        topics = self.topics()
        for begin in range(0, len(topics), _TOLD_AT_ONCE):
            for topic in topics[begin : begin + _TOLD_AT_ONCE]:
                super().announce(topic)
            with suppress(TimeoutError):
                async with asyncio.timeout(_BETWEEN_TURNS_SECONDS):
                    await self._change.wait()
