"""Messages come through Redis again by another connection when the one that carried them has fallen silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from testing.cluster_process import RedisProcess
from testing.tcp_proxy import TcpProxy
from tests.conftest import need_redis
from workers.cluster.redis_channel import MESSAGE_BYTES, RedisChannel, open_redis

DEADLINE_SECONDS = 60


class Member:
    """One process's end of a channel."""

    def __init__(self, url: str) -> None:
        self.redis = open_redis(url)
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.changes: asyncio.Queue[bool] = asyncio.Queue()
        self.channel = RedisChannel(self.redis, "weft-test:channel", self.parts.put_nowait, self.changes.put_nowait)

    async def next_change(self) -> bool:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await self.changes.get()

    async def next_part(self) -> bytes:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await self.parts.get()


@asynccontextmanager
async def member(url: str) -> AsyncIterator[Member]:
    one = Member(url)
    running = asyncio.create_task(one.channel.run())
    try:
        assert await one.next_change()
        yield one
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await one.redis.aclose()


@pytest.fixture
def redis(tmp_path: Path):
    need_redis()
    with RedisProcess(tmp_path / "redis") as process:
        yield process


async def test_a_path_that_vanishes_without_closing_a_connection_is_replaced(redis: RedisProcess) -> None:
    with TcpProxy("127.0.0.1", redis.port) as path:
        async with member(f"redis://127.0.0.1:{path.port}/0") as lost, member(redis.url) as beside:
            path.lose()
            assert not await lost.next_change()
            assert await lost.next_change()
            beside.channel.send(b"to lost")
            lost.channel.send(b"to beside")
            assert (await lost.next_part(), await beside.next_part()) == (b"to lost", b"to beside")
            assert beside.changes.empty(), "another process's path was never missed"


async def test_a_redis_that_stands_still_is_heard_again_when_it_goes_on(redis: RedisProcess) -> None:
    async with member(redis.url) as one, member(redis.url) as other:
        redis.freeze()
        assert [await one.next_change(), await other.next_change()] == [False, False]
        redis.thaw()
        assert [await one.next_change(), await other.next_change()] == [True, True]
        other.channel.send(b"to one")
        assert await one.next_part() == b"to one"


async def test_many_parts_of_one_moment_are_sent_in_messages_of_bounded_size(redis: RedisProcess) -> None:
    parts = [b"%01000d" % number for number in range(3000)]
    async with member(redis.url) as one, member(redis.url) as other, member(redis.url) as beside:
        sizes = noted_sizes(other.channel)
        for part in (*parts, parts[0]):
            one.channel.send(part)
        beside.channel.send(b"a neighbour's")
        came = [await other.next_part() for _ in range(len(parts) + 1)]
        assert [part for part in came if part != b"a neighbour's"] == parts
        assert max(sizes) < MESSAGE_BYTES + 2000


async def test_parts_that_redis_takes_too_slowly_are_bounded_in_bytes(redis: RedisProcess) -> None:
    """A part that says that messages come through is not among those that are dropped."""
    async with member(redis.url) as one, member(redis.url) as other:
        for number in range(10_000):
            one.channel.send(b"%01000d" % number)
        assert len(one.channel._outgoing) < 5000
        one.channel.send(b"")
        assert b"" in one.channel._outgoing
        while await other.next_part() != b"%01000d" % 4000:
            pass
        other.channel.send(b"to one")
        assert await one.next_part() == b"to one"
        one.channel.send(b"later")
        while await other.next_part() != b"later":
            pass
        assert one.changes.empty()


def noted_sizes(channel: RedisChannel) -> list[int]:
    """Return a list to which the size of each message that the channel receives is added."""
    deliver, sizes = channel._deliver, list[int]()

    def noted(message: bytes) -> None:
        sizes.append(len(message))
        deliver(message)

    channel._deliver = noted  # type: ignore[method-assign]
    return sizes
