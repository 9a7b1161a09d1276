"""Samples that change hands while they are drawn: their streams go on, and no token is lost, doubled or mixed up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from api.followed_sample import FollowedSample, followed
from api.sample_submission import SampleSubmission
from api.services import ApiServices
from contracts.base_model import BaseModelFacts, read_base_model_facts
from contracts.errors import EngineFailure, Unavailable
from contracts.ids import RequestId, SamplerId, TenantId
from contracts.operations import SampleRequest, SamplingParams
from contracts.vocabulary import BaseVocabulary
from engine.model.base import BaseModel
from engine.sampling.replica import NewToken, ReplicaHealth, SamplerReplica
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import cleared_samples_topic, gates_topic
from store.clock import utc_now
from store.database import Database, create_engine
from store.repeat import wait_for
from telemetry.readiness import Readiness
from tenants.gates import GateMode, Pause, in_flight, pause_gate, pool_gate, resume_gate
from tenants.sample_reports import report_of
from tenants.samplers import NewSampler, create_sampler
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.cluster_process import RedisProcess
from tests.workers.runtimes import make_runtime
from workers.cluster.redis_channel import open_redis
from workers.cluster.redis_feed import RedisTokenFeed
from workers.sampling import resumption
from workers.sampling.sampler_wiring import BaseSampling, wire_sampling
from workers.sampling.worker import SamplingWorker
from workers.torch_source import TorchSource

BASE = "weft/tiny"
SECONDS = 60.0
LENGTH = 300
BRIEF_LEASE = timedelta(seconds=1.5)
"""Lease of pools that are to lose it. On a busy machine they lose it sooner."""
VOCABULARY = BaseVocabulary(frozenset(), None)


class HeldReplica:
    """A replica whose tokens stand still while ``running`` is clear, as those of a frozen process do.

    Once ``is_gone``, requests fail and nobody answers.
    """

    def __init__(self, replica: SamplerReplica) -> None:
        self._replica = replica
        self.running = asyncio.Event()
        self.running.set()
        self.is_gone = False
        self.drawn = 0
        """Tokens that were drawn here."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        async for events in self._replica.generate(request):
            await self.running.wait()
            if self.is_gone:
                raise EngineFailure("the server has died")
            self.drawn += sum(isinstance(event, NewToken) for event in events)
            yield events

    async def health(self) -> ReplicaHealth:
        found = await self._replica.health()
        return replace(found, alive=found.alive and not self.is_gone)


class HeldSource(TorchSource):
    """Starts a held replica."""

    replica: HeldReplica

    async def start(self) -> Any:
        self.replica = HeldReplica(await super().start())
        return self.replica


@dataclass
class Pool:
    """A sampling process in this process."""

    sampling: BaseSampling
    source: HeldSource
    task: asyncio.Task[None]

    async def end(self) -> None:
        """End in order, as at SIGTERM."""
        self.source.replica.running.set()
        self.sampling.worker.stop()
        async with asyncio.timeout(SECONDS):
            await self.task
        await self.sampling.pool.close()


@dataclass
class Stream:
    """A sample that is streamed: its tokens in the order in which they came."""

    sample: FollowedSample
    tokens: list[int] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    is_broken: bool = False

    async def read(self) -> list[int]:
        """Read to the end; return the tokens of the recorded result."""
        async for made in self.sample.tokens():
            for part in made:
                self.is_broken = part.start != len(self.tokens)
                if self.is_broken:
                    self.came.set()
                assert not self.is_broken, "a hole, or tokens that were streamed before"
                self.tokens += part.tokens
            self.came.set()
        return (await self.sample.output()).sequences[0].tokens.tolist()

    async def until(self, count: int) -> None:
        """Wait for so many tokens."""
        async with asyncio.timeout(SECONDS):
            while len(self.tokens) < count:
                self.came.clear()
                assert not self.is_broken
                await self.came.wait()


@dataclass
class Rig:
    """A database, an API and pools of one base model."""

    runtime: Runtime
    base: BaseModel
    services: ApiServices
    samplers: list[tuple[TenantId, SamplerId]]
    pools: list[Pool] = field(default_factory=list)

    @property
    def facts(self) -> BaseModelFacts:
        return self.base.facts

    async def pool(self, feed: TokenFeed | None = None) -> Pool:
        """Start a pool. ``feed``: its own end of the token feed."""
        settings = self.runtime.settings.model_copy(update={"pool_name": f"pool-{len(self.pools)}"})
        runtime = replace(self.runtime, settings=settings, feed=feed or self.runtime.feed)
        source = HeldSource(self.base, settings)
        sampling = wire_sampling(runtime, self.facts, VOCABULARY, [source])
        await sampling.pool.start()
        self.pools.append(Pool(sampling, source, asyncio.create_task(sampling.worker.run())))
        return self.pools[-1]

    @asynccontextmanager
    async def stream(self, owner: int, *, temperature: float = 1.0, **asked: Any) -> AsyncIterator[Stream]:
        """A stream of the tenant's next sample."""
        tenant, sampler = self.samplers[owner]
        params = SamplingParams(max_tokens=LENGTH, temperature=temperature, stop_tokens=[])
        submission = SampleSubmission(
            tenant, sampler, 0, BASE, SampleRequest(np.array([5, 6, 7]), 1, params, **asked), digest=b"a sample"
        )
        async with followed(self.services, submission) as sample:
            yield Stream(sample)

    async def attempts(self, owner: int, sample: RequestId) -> int:
        """Return the number of the sample's dispatches."""
        async with self.runtime.database.read() as session:
            report, _ = await report_of(session, self.samplers[owner][0], sample)
        return report.attempts

    async def pause(self) -> None:
        """Close the base's gate, and wait until no sample is in flight."""
        async with self.runtime.database.write() as transaction:
            pause = Pause(GateMode.KEEP)
            await pause_gate(transaction, pool_gate(BASE), tenant=None, base_model=BASE, pause=pause, clock=utc_now)
        with self.runtime.wakeups.listen(cleared_samples_topic(BASE)) as cleared:
            self.runtime.wakeups.announce(gates_topic(BASE))
            async with asyncio.timeout(SECONDS):
                while await self.in_flight():
                    await wait_for(cleared, 0.1)

    async def resume(self) -> None:
        """Open the base's gate."""
        async with self.runtime.database.write() as transaction:
            await resume_gate(transaction, pool_gate(BASE), generation=None, clock=utc_now)
        self.runtime.wakeups.announce(gates_topic(BASE))

    async def in_flight(self) -> int:
        async with self.runtime.database.read() as session:
            return await in_flight(session, pool_gate(BASE))


@asynccontextmanager
async def rig_on(
    url: str, base: BaseModel, folder: Path, *, feed: TokenFeed | None = None, lease: timedelta = timedelta(minutes=5)
) -> AsyncIterator[Rig]:
    database = Database(create_engine(url))
    runtime = make_runtime(database, folder, utc_now, lease=lease)
    if feed is not None:
        runtime = replace(runtime, feed=feed)
    samplers = []
    async with database.write() as transaction:
        for name in ("cat", "dog"):
            tenant = await create_tenant(transaction, name=name, clock=utc_now)
            session = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
            samplers.append((tenant, await create_sampler(transaction, tenant, NewSampler(session, 0, BASE), utc_now)))
    services = ApiServices.over(runtime, {BASE: base.facts}, {BASE: VOCABULARY}, Readiness())
    rig = Rig(runtime, base, services, samplers)
    try:
        yield rig
    finally:
        for pool in rig.pools:
            if not pool.task.done():
                await pool.end()
        await database.close()


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> BaseModel:
    return BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))


@pytest_asyncio.fixture
async def rig(database_url: str, base: BaseModel, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_on(database_url, base, tmp_path) as made:
        yield made


@pytest_asyncio.fixture
async def brief_leases(migrated_postgres_url: str, base: BaseModel, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_on(migrated_postgres_url, base, tmp_path, lease=BRIEF_LEASE) as made:
        yield made


@pytest_asyncio.fixture
async def cluster(migrated_postgres_url: str, base: BaseModel, tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_on(migrated_postgres_url, base, tmp_path) as made:
        yield made


async def test_the_next_pool_goes_on_with_the_tokens_of_one_that_ended(rig: Rig) -> None:
    """A rolling restart: no token that was drawn is drawn again."""
    first = await rig.pool()
    async with rig.stream(0) as mine, rig.stream(1, temperature=0.0) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        await first.end()
        kept = len(mine.tokens)
        assert kept < LENGTH
        await rig.pool()
        async with asyncio.timeout(SECONDS):
            whole, greedy = await asyncio.gather(*reading)
        assert mine.tokens == whole
        assert beside.tokens == greedy
        assert await rig.attempts(0, mine.sample.request_id) == 2


def away_once(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Have the database be away when tokens are saved for the first time; return the event of that."""
    save, was_away = resumption.save_progress, asyncio.Event()

    async def away(*arguments: Any) -> None:
        if not was_away.is_set():
            was_away.set()
            raise Unavailable("the database is away")
        await save(*arguments)

    monkeypatch.setattr(resumption, "save_progress", away)
    return was_away


async def test_tokens_that_could_not_be_saved_at_an_orderly_end_are_asked_of_who_follows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is away when the pool saves them, and back when it leaves. No stream has a hole or a token twice."""
    first, was_away = await rig.pool(), away_once(monkeypatch)
    async with rig.stream(0) as mine, rig.stream(1, temperature=0.0) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        await first.end()
        assert was_away.is_set()
        second = await rig.pool()
        async with asyncio.timeout(SECONDS):
            whole, greedy = await asyncio.gather(*reading)
        assert mine.tokens == whole
        assert beside.tokens == greedy
        assert second.source.replica.drawn <= 2 * (LENGTH - 20)


@pytest.mark.parametrize("how", ["dead", "drained", "dead and the database away"])
async def test_a_pool_without_a_replica_gives_its_samples_with_their_tokens_to_one_that_has_some(
    cluster: Rig, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample fails, waits for the first pool or loses a token."""
    first = await cluster.pool()
    was_away = away_once(monkeypatch) if "away" in how else None
    (routed,) = first.sampling.pool.router.replicas
    async with cluster.stream(0) as mine, cluster.stream(1, temperature=0.0) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        if how == "drained":
            # What is drawn there ends there; what was cut does not begin there again.
            await cluster.pause()
            first.sampling.pool.router.drain(routed, is_draining=True)
        # Nothing ends before the second one is there.
        first.source.replica.running.clear()
        await cluster.pool()
        if how == "drained":
            await cluster.resume()
        else:
            first.source.replica.is_gone = True
        first.source.replica.running.set()
        async with asyncio.timeout(SECONDS):
            whole, greedy = await asyncio.gather(*reading)
        assert mine.tokens == whole
        assert beside.tokens == greedy
        for owner, stream in enumerate((mine, beside)):
            assert await cluster.attempts(owner, stream.sample.request_id) == 2
        assert was_away is None or was_away.is_set()


async def test_a_stream_goes_on_where_its_pool_froze_and_the_frozen_pool_does_not_disturb_it(
    brief_leases: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stands still for longer than its lease, is taken for dead, and comes back.

    What it does first is to draw on, as far as the samples go, before it looks at its lease.
    """
    mind, thawed, frozen_worker = SamplingWorker._mind_lease, asyncio.Event(), list[SamplingWorker]()

    async def mind_later(self: SamplingWorker) -> None:
        if self in frozen_worker:
            await thawed.wait()
        await mind(self)

    monkeypatch.setattr(SamplingWorker, "_mind_lease", mind_later)
    frozen = await brief_leases.pool()
    async with brief_leases.stream(0) as mine, brief_leases.stream(1) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        frozen_worker.append(frozen.sampling.worker)
        frozen.source.replica.running.clear()
        heartbeat = frozen.sampling.heartbeat._heartbeat
        renew = heartbeat.renew

        async def stand_still() -> None:
            await thawed.wait()
            await renew()

        monkeypatch.setattr(heartbeat, "renew", stand_still)
        had = [len(mine.tokens), len(beside.tokens)]
        second = await brief_leases.pool()
        for stream, count in zip((mine, beside), had, strict=True):
            await stream.until(count + 20)
        second.source.replica.running.clear()
        frozen.source.replica.running.set()
        async with asyncio.timeout(SECONDS):
            while frozen.source.replica.drawn < 2 * LENGTH:
                await wait_for(asyncio.Event(), 0.02)
        thawed.set()
        second.source.replica.running.set()
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*reading)
        assert [mine.tokens, beside.tokens] == ends


async def test_a_message_that_redis_loses_leaves_no_hole_in_a_stream(
    migrated_postgres_url: str, base: BaseModel, tmp_path: Path
) -> None:
    """One message with tokens does not reach the API. The tokens come all the same, before the sample has ended.

    What came before them comes once, as everything of a neighbour's stream.
    """
    with RedisProcess(tmp_path / "redis") as server:
        clients = [open_redis(server.url) for _ in range(2)]
        api, pool = (LosingFeed(client, "weft") for client in clients)
        running = [asyncio.create_task(feed.run()) for feed in (api, pool)]
        async with (
            rig_on(migrated_postgres_url, base, tmp_path, feed=api) as rig,
            rig.stream(0) as mine,
            rig.stream(1) as beside,
        ):
            api.loses = mine.sample
            async with asyncio.timeout(SECONDS):
                while not all(pool.is_followed(one.sample._submission.key) for one in (mine, beside)):
                    await wait_for(asyncio.Event(), 0.02)
            # What is drawn before its pool hears of the follower is sent twice.
            await rig.pool(feed=pool)
            reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
            await mine.until(40)
            assert api.lost
            assert not mine.sample._ending.done()
            async with asyncio.timeout(SECONDS):
                ends = await asyncio.gather(*reading)
            # What was streamed late comes with the result.
            assert [mine.tokens, beside.tokens] == [
                end[: len(stream.tokens)] for end, stream in zip(ends, (mine, beside), strict=True)
            ]
            assert set(api.lost) <= set(range(len(mine.tokens)))
            assert max(api.came[mine.sample._submission.key][: min(api.lost)]) == 1
            assert max(api.came[beside.sample._submission.key]) == 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for client in clients:
            await client.aclose()


class LosingFeed(RedisTokenFeed):
    """Loses the first message that brings the sample's tokens from the 20th on; ``lost`` are their places.

    ``came``: how often each place of a sample's tokens came.
    """

    loses: FollowedSample | None = None
    lost: tuple[int, ...] = ()

    def __init__(self, redis: Redis, namespace: str) -> None:
        super().__init__(redis, namespace)
        self.came: dict[tuple[str, int], list[int]] = {}

    def _receive(self, part: bytes) -> None:
        made = msgspec.json.decode(part).get("made")
        if made is not None:
            key = (made["lane"], made["seq_id"])
            places = tuple(one["start"] + at for one in made["made"] for at in range(len(one["tokens"])))
            if self.loses is not None and not self.lost and key == self.loses._submission.key and min(places) >= 20:
                self.lost = places
                return
            for place in places:
                self.came.setdefault(key, [0] * LENGTH)[place] += 1
        super()._receive(part)
