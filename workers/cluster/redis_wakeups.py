"""Wake-ups between processes, over Redis: a process tells the listeners of a topic to look into the database again.

A lost wake-up costs time only, since every listener also looks by itself. While Redis cannot be reached, every listener is
woken twice a second.
"""

import asyncio
import logging
from collections.abc import Collection
from time import monotonic

from redis.asyncio import Redis

from ledger.wakeups import PLACEMENTS, Wakeups
from store.repeat import repeat, wait_for_any
from workers.cluster.redis_channel import OUTAGE_SECONDS, RedisChannel, first_parts, message, new_sender

log = logging.getLogger(__name__)

NET_SECONDS = 10.0
"""Seconds between two rounds that wake every listener while Redis is well."""
_WOKEN_AT_ONCE = 32
_BETWEEN_TURNS_SECONDS = 0.05


async def publish_once(redis: Redis, namespace: str, topics: Collection[str]) -> None:
    """Wake the listeners of ``topics`` in every process, from a process that has none. Raises ``RedisError``, ``OSError``."""
    told = [topic.encode() for topic in topics if not topic.startswith(PLACEMENTS)]
    while told:
        parts = first_parts(told)
        await redis.publish(f"{namespace}:wakeups", message(new_sender(), parts))
        told = told[len(parts) :]


class RedisWakeups(Wakeups):
    """Topics and listeners of all processes.

    Topics of placements stay in their process: a Celery queue tells one trainer of each placement.
    """

    def __init__(self, redis: Redis, namespace: str) -> None:
        """Use the channel of ``namespace``, which keeps services apart that share a Redis."""
        super().__init__()
        self._channel = RedisChannel(redis, f"{namespace}:wakeups", self._receive, self._changed)
        self._is_through = False
        self._change = asyncio.Event()
        self._woken_at = monotonic()

    @property
    def is_through(self) -> bool:
        """True while wake-ups of other processes come through."""
        return self._is_through

    def announce(self, topic: str) -> None:
        """Wake the listeners of ``topic`` in this process and, a little later, in others."""
        super().announce(topic)
        if not topic.startswith(PLACEMENTS):
            self._channel.send(topic.encode())

    async def run(self) -> None:
        """Send and receive until cancelled."""
        net = repeat(
            self._wake_everybody,
            seconds=lambda: NET_SECONDS if self._is_through else OUTAGE_SECONDS,
            wake=self._change,
            failed="listeners could not be woken",
        )
        await asyncio.gather(self._channel.run(), net)

    def _receive(self, part: bytes) -> None:
        super().announce(part.decode(errors="replace"))

    def _changed(self, is_through: bool) -> None:
        self._is_through = is_through
        self._change.set()

    async def _wake_everybody(self) -> None:
        """Wake all listeners of this process: a wake-up may have been lost."""
        log.debug("everybody looks, %.1f s after the last time", monotonic() - self._woken_at)
        self._woken_at = monotonic()
        if self._is_through:
            await self._wake_in_turn()
        else:
            self.announce_all()

    async def _wake_in_turn(self) -> None:
        """Wake a few listeners at a time. If a thousand polls looked at once, each would wait for all the others."""
        topics = self.topics()
        for begin in range(0, len(topics), _WOKEN_AT_ONCE):
            for topic in topics[begin : begin + _WOKEN_AT_ONCE]:
                super().announce(topic)
            await wait_for_any([self._change], _BETWEEN_TURNS_SECONDS)
