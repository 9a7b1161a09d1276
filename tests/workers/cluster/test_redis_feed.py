"""Streamed tokens between processes: messages of bounded size, so that no tenant's samples cut the others' processes off."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from ledger.token_feed import TokensMade
from testing.cluster_process import RedisProcess
from tests.conftest import need_redis
from tests.workers.sampling.long_samples import Follower, LongSample
from workers.cluster import redis_feed
from workers.cluster.redis_channel import MESSAGE_BYTES, open_redis
from workers.cluster.redis_feed import PART_BYTES, RedisTokenFeed
from workers.cluster.redis_wakeups import publish_once
from workers.sampling.token_publisher import AGAIN_AT_ONCE, TokenPublisher

DEADLINE_SECONDS = 60
NAMESPACE = "weft-test"


@pytest.fixture
def redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Redis, and feeds that tell nothing by the clock."""
    need_redis()
    monkeypatch.setattr(redis_feed, "_TOLD_AGAIN_SECONDS", 3600.0)
    monkeypatch.setattr(redis_feed, "_FORGOTTEN_SECONDS", 3600.0)
    with RedisProcess(tmp_path / "redis") as process:
        yield process


class Feed(RedisTokenFeed):
    """A process's feed that tells when it hears of followers and of asked samples, and whether it was ever cut off."""

    def __init__(self, client: Redis) -> None:
        super().__init__(client, NAMESPACE)
        self.heard = asyncio.Event()
        self.through: list[bool] = []

    def _receive(self, part: bytes) -> None:
        super()._receive(part)
        self.heard.set()

    def _changed(self, is_through: bool) -> None:
        super()._changed(is_through)
        self.through.append(is_through)
        self.heard.set()

    async def until(self, *keys: tuple[str, int]) -> None:
        """Wait until the process hears that others follow the samples."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not all(self.is_followed(key) for key in keys):
                self.heard.clear()
                await self.heard.wait()

    async def until_asked(self, key: tuple[str, int]) -> None:
        """Wait until the process hears that a follower has missed tokens of the sample."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while key not in self._missed:
                self.heard.clear()
                await self.heard.wait()


@asynccontextmanager
async def feeds(url: str, count: int) -> AsyncIterator[list[Feed]]:
    """Feeds of so many processes, through which messages come."""
    clients = [open_redis(url) for _ in range(count)]
    made = [Feed(client) for client in clients]
    running = [asyncio.create_task(feed.run()) for feed in made]
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            for feed in made:
                await feed.heard.wait()
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for client in clients:
            await client.aclose()


class Observer:
    """Every message on one channel, read as fast as it comes, so that Redis cuts nobody off."""

    def __init__(self, pubsub: PubSub) -> None:
        self._pubsub, self._came, self._answered = pubsub, list[bytes](), asyncio.Event()

    async def listen(self) -> None:
        while True:
            message = await self._pubsub.get_message(timeout=1.0)
            if message is None:
                continue
            if message["type"] == "pong":
                self._answered.set()
            else:
                self._came.append(message["data"])

    async def taken(self) -> list[bytes]:
        """Return all that Redis was given before this call; the next call begins behind it."""
        self._answered.clear()
        await self._pubsub.ping()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._answered.wait()
        came, self._came = self._came, []
        return came


@asynccontextmanager
async def observed(url: str, channel: str) -> AsyncIterator[Observer]:
    async with open_redis(url) as client, client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(f"{NAMESPACE}:{channel}")
        observer = Observer(pubsub)
        listening = asyncio.create_task(observer.listen())
        try:
            yield observer
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def test_a_long_sample_that_is_asked_for_again_cuts_nobody_off(redis: RedisProcess) -> None:
    """Redis cuts off a process for which 1 MiB waits; the sample would take 7. A neighbour's stream has no gap."""
    async with feeds(redis.url, 3) as (pool, mine, theirs), observed(redis.url, "tokens") as observer:
        async with open_redis(redis.url) as client:
            await client.config_set("client-output-buffer-limit", "pubsub 1048576 0 0")
        publisher, cat, dog = TokenPublisher(pool), LongSample("cat", 200_000), LongSample("dog", 5)
        with mine.follow(cat.key) as queue, theirs.follow(dog.key) as beside:
            follower, neighbour = Follower(mine, cat, queue), Follower(theirs, dog, beside)
            await pool.until(cat.key, dog.key)
            theirs.ask_again(dog.key, {0: 0})
            await pool.until_asked(dog.key)
            async with asyncio.timeout(DEADLINE_SECONDS):
                cat.draw(publisher)
                await follower.read_next()
                await pool.until_asked(cat.key)
                while len(follower.heard()) < AGAIN_AT_ONCE or len(neighbour.heard()) < 20:
                    cat.draw(publisher)
                    dog.draw(publisher)
                    await asyncio.gather(follower.read_next(), neighbour.read_next())
        assert [pool.through, mine.through, theirs.through] == [[True]] * 3
        heard = follower.heard()
        assert heard == cat.whole[: len(heard)]
        assert neighbour.heard() == dog.whole[: len(neighbour.heard())]
        sizes = [len(message) for message in await observer.taken()]
        assert max(sizes) < MESSAGE_BYTES + PART_BYTES


async def test_tokens_of_many_sequences_come_in_parts_that_are_whole_together(redis: RedisProcess) -> None:
    made = [TokensMade(index, 7, "run@1", list(range(300)), [-0.123456789] * 300) for index in range(64)]
    async with feeds(redis.url, 2) as (pool, api), observed(redis.url, "tokens") as observer:
        with api.follow(("cat", 0)) as queue, api.follow(("dog", 0)) as beside:
            await pool.until(("cat", 0), ("dog", 0))
            await observer.taken()
            pool.publish(("cat", 0), made)
            pool.publish(("dog", 0), made[:1])
            async with asyncio.timeout(DEADLINE_SECONDS):
                (theirs,) = await beside.get()
            assert theirs == made[0]
            heard: dict[int, list[int]] = {}
            while not queue.empty():
                for part in queue.get_nowait():
                    assert part.start == 7 + len(heard.setdefault(part.sequence, []))
                    assert len(part.tokens) == len(part.logprobs)
                    heard[part.sequence] += part.tokens
            assert heard == {index: list(range(300)) for index in range(64)}
        parts = [part for message in await observer.taken() for part in message.split(b"\n")[1:]]
        assert max(map(len, parts)) <= PART_BYTES


async def test_a_process_that_follows_many_samples_tells_of_them_in_parts(redis: RedisProcess) -> None:
    keys = [(f"a lane with a name of some length, number {number}", number) for number in range(3000)]
    async with feeds(redis.url, 2) as (pool, api), observed(redis.url, "tokens") as observer:
        await observer.taken()
        api._followers = {key: [] for key in keys}
        await api._tell_again()
        await pool.until(*keys)
        sizes = [len(part) for message in await observer.taken() for part in message.split(b"\n")[1:]]
        assert max(sizes) < 2 * PART_BYTES


async def test_a_process_of_an_earlier_version_that_misses_tokens_gets_all_of_them(redis: RedisProcess) -> None:
    async with feeds(redis.url, 2) as (pool, api):
        cat, dog = LongSample("cat", 30, sequences=2), LongSample("dog", 30)
        with api.follow(cat.key) as queue, api.follow(dog.key) as beside:
            await pool.until(cat.key, dog.key)
            api._channel.send(msgspec.json.encode({"missed": cat.key}))
            await pool.until_asked(cat.key)
            for sample in (cat, dog):
                sample.draw(TokenPublisher(pool))
            async with asyncio.timeout(DEADLINE_SECONDS):
                mine, theirs = await queue.get(), await beside.get()
            assert [(part.sequence, part.start, len(part.tokens)) for part in mine] == [(0, 0, 31), (1, 0, 31)]
            assert [(part.start, part.tokens) for part in theirs] == [(30, [30])]


async def test_many_topics_of_a_command_are_told_in_messages_of_bounded_size(redis: RedisProcess) -> None:
    topics = [f"operation:{number:0100}" for number in range(10_000)]
    async with observed(redis.url, "wakeups") as observer, open_redis(redis.url) as client:
        await publish_once(client, NAMESPACE, [*topics, "placements:weft/tiny"])
        told = await observer.taken()
        assert max(map(len, told)) < MESSAGE_BYTES + PART_BYTES
        assert [part.decode() for message in told for part in message.split(b"\n")[1:]] == topics
