"""Messages come through Redis again by another connection when the one that carried them has fallen silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from testing.cluster_process import RedisProcess
from testing.tcp_proxy import TcpProxy
from tests.conftest import need_redis
from workers.cluster.redis_channel import RedisChannel, open_redis

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
