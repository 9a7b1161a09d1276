"""A Redis channel between processes: small messages, published by each process and received by all others.

Redis stores no message, so an outage drops messages. A channel tells whether messages come through, since each process also
hears its own. Once they come through again, the channel's user looks for what it missed in the database.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from uuid import uuid4

from redis.asyncio import Redis
from redis.exceptions import RedisError

from store.repeat import repeat

log = logging.getLogger(__name__)

OUTAGE_SECONDS = 0.5
"""Seconds between two tries while Redis cannot be reached."""
_SOCKET_SECONDS = 5.0
_SILENCE_SECONDS = 2.0
_PROBE = b""
_PROBE_SECONDS = 1.0
_DEAF_SECONDS = 3.0
"""Seconds without a message of its own after which a process subscribes anew."""
_DEAF_PROBES = 3
"""Probes, each unheard for ``_PROBE_SECONDS``, after which a process concludes that messages do not come through.

Time alone says nothing: a process that stood still has not read yet what has come.
"""
_MOST_KEPT = 4096
"""Most parts kept for sending again."""
MESSAGE_BYTES = 256 * 1024
"""Most bytes of the parts of a message. Redis cuts off a process for which it keeps too many bytes that are not read yet."""
_WAITING_BYTES = 4 * 1024 * 1024
"""Most bytes of parts that wait to be sent. Others are dropped: the database has the facts that they told."""

Receive = Callable[[bytes], None]


def open_redis(url: str) -> Redis:
    """Return a client of the Redis at ``url`` whose connects and reads have time limits."""
    return Redis.from_url(
        url, socket_connect_timeout=_SOCKET_SECONDS, socket_timeout=_SOCKET_SECONDS, health_check_interval=30
    )


def new_sender() -> bytes:
    """Return a name by which a process knows its own messages."""
    return uuid4().hex[:16].encode()


def message(sender: bytes, parts: Sequence[bytes]) -> bytes:
    """Return the message that carries ``parts``, which have no line breaks."""
    return b"\n".join([sender, *parts])


def first_parts(parts: Iterable[bytes]) -> list[bytes]:
    """Return the first parts that go into one message together: at least one, and else ``MESSAGE_BYTES``."""
    chosen: list[bytes] = []
    left = MESSAGE_BYTES
    for part in parts:
        left -= len(part)
        if chosen and left < 0:
            break
        chosen.append(part)
    return chosen


class RedisChannel:
    """One channel. Parts sent at the same moment go out in few messages. ``receive`` is called with other processes' parts."""

    def __init__(self, redis: Redis, name: str, receive: Receive, on_change: Callable[[bool], None]) -> None:
        """``on_change`` is called with whether messages come through, whenever that changes."""
        self._redis = redis
        self._name = name
        self._receive = receive
        self._on_change = on_change
        self._sender = new_sender()
        self._outgoing: dict[bytes, None] = {}
        self._outgoing_bytes = 0
        self._added = asyncio.Event()
        self._heard = float("-inf")
        self._unheard = 0
        """Probes since this process has heard a message of its own."""
        self._is_through = False

    def send(self, part: bytes) -> None:
        """Send ``part``, which has no line break, to all other processes soon. Equal parts of one message are sent once."""
        if part in self._outgoing or self._outgoing_bytes + len(part) > _WAITING_BYTES:
            return
        self._outgoing[part] = None
        self._outgoing_bytes += len(part)
        self._added.set()

    async def run(self) -> None:
        """Send and receive until cancelled."""
        await asyncio.gather(
            self._publish(),
            repeat(self._listen, seconds=OUTAGE_SECONDS, failed=f"messages on {self._name} cannot be read"),
            repeat(self._probe, seconds=_PROBE_SECONDS, failed=f"{self._name} cannot be probed"),
        )

    async def _probe(self) -> None:
        """Send a message that this process must hear itself: a connection may be open although its server has stopped."""
        if self._unheard >= _DEAF_PROBES:
            self._note(is_through=False)
        self._unheard += 1
        self.send(_PROBE)

    def _note(self, *, is_through: bool) -> None:
        if is_through != self._is_through:
            self._is_through = is_through
            self._on_change(is_through)

    async def _publish(self) -> None:
        while True:
            await self._added.wait()
            self._added.clear()
            parts = self._take()
            try:
                await self._redis.publish(self._name, message(self._sender, parts))
            except (RedisError, OSError) as error:
                log.debug("%d parts on %s are sent again: %s", len(parts), self._name, error)
                await self._send_again(parts)
            except Exception:
                log.exception("%d parts on %s are sent again", len(parts), self._name)
                await self._send_again(parts)

    def _take(self) -> list[bytes]:
        """Remove the parts of the next message from what is outgoing, and return them."""
        parts = first_parts(self._outgoing)
        for part in parts:
            del self._outgoing[part]
        self._outgoing_bytes -= sum(map(len, parts))
        if self._outgoing:
            self._added.set()
        return parts

    async def _send_again(self, parts: list[bytes]) -> None:
        """Put the first ``_MOST_KEPT`` parts back and pause. The database has the facts that the dropped parts told."""
        self._outgoing = dict.fromkeys([*parts, *self._outgoing][:_MOST_KEPT])
        self._outgoing_bytes = sum(map(len, self._outgoing))
        self._added.set()
        await asyncio.sleep(OUTAGE_SECONDS)

    async def _listen(self) -> None:
        """Subscribe and receive until the connection fails, or carries nothing any more.

        A host that vanishes closes no connection, and reads then only come to nothing for many minutes.
        """
        try:
            async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                await pubsub.subscribe(self._name)
                subscribed, silent = monotonic(), 0
                self.send(_PROBE)
                while True:
                    message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
                    silent = silent + 1 if message is None else 0
                    if message is not None:
                        self._deliver(message["data"])
                    # Twice: a process that stood still finds its messages with the second read.
                    elif silent > 1 and monotonic() - max(self._heard, subscribed) > _DEAF_SECONDS:
                        raise ConnectionError(f"{self._name} carries no messages")
        except (RedisError, OSError) as error:
            log.warning("Redis cannot be reached: %s", error)
        finally:
            self._note(is_through=False)

    def _deliver(self, message: bytes) -> None:
        sender, *parts = message.split(b"\n")
        if sender == self._sender:
            self._heard, self._unheard = monotonic(), 0
            self._note(is_through=True)
            return
        for part in parts:
            if part != _PROBE:
                self._receive(part)
