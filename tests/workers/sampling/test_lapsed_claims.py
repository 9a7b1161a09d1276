"""A lapse of a pool's lease returns what it has cut by its claims' numbers: a newer claim of the same process is left alone."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from sqlalchemy import select

from contracts.base_model import read_base_model_facts
from contracts.ids import RequestId
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleRequest
from engine.model.base import BaseModel
from engine.sampling.replica import NewToken
from ledger.runtime import Runtime
from ledger.sample_claims import claim_samples
from ledger.wakeups import sampling_topic
from store.clock import utc_now
from store.database import Database, create_engine
from store.repeat import wait_for
from store.tables import Operation, ProcessKind, SampleInFlight
from tenants.gates import Dispatch, make_gates, mark_in_flight
from tenants.sample_progress import saved_progress
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import BASE, Drawer, make_drawer
from tests.workers.sampling.test_handed_over import BRIEF_LEASE, SECONDS, Rig, rig_on
from tests.workers.sampling.test_lost_lease import LateRenewal
from workers.leases.pools import PoolHeartbeat
from workers.leases.processes import new_identity
from workers.leases.reaper import reap_pools
from workers.sampling.continuation import Continuation
from workers.sampling.lapsed_lease import LapsedLease
from workers.sampling.resumption import Resumption, Unfinished
from workers.sampling.sample_runner import History
from workers.sampling.stop_conditions import StopRules

TOKENS = (7, 8, 9)


@dataclass
class Lapsed:
    """A sampling process, its lapse, and two tenants that send samples."""

    lapse: LapsedLease
    heartbeat: PoolHeartbeat
    cat: Drawer
    dog: Drawer

    async def draw(self, drawer: Drawer, sample: RequestId) -> Unfinished:
        """Claim the sample, mark it in flight, and draw some tokens of it."""
        runtime, process = drawer.runtime, self.heartbeat.identity.id
        async with runtime.database.write() as transaction:
            await claim_samples(transaction, [sample], process=process)
            (operation,) = await runtime.ledger.load(transaction, [sample])
        dispatch = Dispatch(sample, drawer.tenant, BASE, None, None, "replica", process)
        async with runtime.database.write() as transaction:
            await make_gates(transaction, dispatch, utc_now)
            await mark_in_flight(transaction, [dispatch], utc_now)
        return operation, drawn(operation), History()

    async def in_flight(self) -> set[str]:
        """Return the samples that have an in-flight row."""
        async with self.cat.runtime.database.read() as session:
            return set(await session.scalars(select(SampleInFlight.operation_id)))

    async def saved_tokens(self, sample: RequestId) -> bool:
        """Return whether all tokens of the sample are saved, as the next drawing goes on with them."""
        async with self.cat.runtime.database.read() as session:
            saved = await saved_progress(session, sample)
        return saved is not None and bool(saved.body) and not saved.is_stale


def drawn(operation: ReadyOperation) -> Continuation:
    """Return some tokens of the sample."""
    assert isinstance(operation.payload, SampleRequest)
    rules = StopRules(8, frozenset(), (), None)
    made = Continuation(
        operation.id, operation.payload, rules, cache_salt="", owner=operation.tenant, share=operation.share
    )
    (request,) = made.requests(None, 1)
    for token in TOKENS:
        made.take(request, NewToken(0, token, -1.0, None))
    return made


@pytest.fixture
async def lapsed(database_url: str, tmp_path: Path) -> AsyncIterator[Lapsed]:
    database = Database(create_engine(database_url))
    runtime = make_runtime(database, tmp_path, utc_now)
    heartbeat = PoolHeartbeat(new_identity(ProcessKind.POOL, BASE, 8), runtime)
    await heartbeat.look()
    lapse = LapsedLease(runtime, BASE, heartbeat, Resumption(runtime))
    yield Lapsed(lapse, heartbeat, await make_drawer(runtime), await make_drawer(runtime))
    await database.close()


async def test_a_lapse_returns_no_sample_that_its_process_has_claimed_anew(lapsed: Lapsed) -> None:
    """The newer drawing keeps its row and its stale progress. A neighbour's sample of the same lapse is saved and returned."""
    cat, dog, runtime = lapsed.cat, lapsed.dog, lapsed.cat.runtime
    mine, beside = await cat.send(5), await dog.send(6)
    lapsed.lapse.unsaved.append(await lapsed.draw(cat, mine))
    async with runtime.database.write() as transaction:
        await reap_pools(transaction, [lapsed.heartbeat.identity.id], BASE, runtime)
    await lapsed.heartbeat.look()
    lapsed.lapse.unsaved.append(await lapsed.draw(dog, beside))
    again, _, _ = await lapsed.draw(cat, mine)
    assert again.claim == 2
    lapsed.lapse.is_off = True
    assert await lapsed.lapse.mind({})
    assert await lapsed.in_flight() == {mine}
    assert [await lapsed.saved_tokens(one) for one in (mine, beside)] == [False, True]


async def test_a_sample_whose_cut_outlasts_the_lapse_is_returned_after_the_others(lapsed: Lapsed) -> None:
    mine, beside = await lapsed.cat.send(5), await lapsed.dog.send(6)
    late, first = await lapsed.draw(lapsed.cat, mine), await lapsed.draw(lapsed.dog, beside)
    lapsed.lapse.is_off = True
    lapsed.lapse.unsaved.append(first)
    assert await lapsed.lapse.mind({})
    assert await lapsed.in_flight() == {mine}
    lapsed.lapse.unsaved.append(late)
    assert await lapsed.lapse.mind({})
    assert await lapsed.in_flight() == set()
    assert await lapsed.saved_tokens(mine)
    assert not await lapsed.lapse.mind({})


@pytest_asyncio.fixture
async def cluster(migrated_postgres_url: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    async with rig_on(migrated_postgres_url, base, tmp_path, lease=BRIEF_LEASE) as made:
        yield made


async def test_a_pool_claims_nothing_until_its_lapse_has_returned_what_it_cut(
    cluster: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer has reaped the pool, and its lease is back. Its tenants' samples are claimed once the return is through."""
    pool, runtime = await cluster.pool(), cluster.runtime
    worker, replica = pool.sampling.worker, pool.source.replica
    drawers = [Drawer(runtime, *sampler) for sampler in cluster.samplers]
    sent = [await drawer.send(5, tokens=60) for drawer in drawers]
    async with asyncio.timeout(SECONDS):
        while not set(sent) <= worker._drawn.keys():
            await wait_for(asyncio.Event(), 0.02)
        replica.running.clear()
        renewal = LateRenewal(pool, monkeypatch)
        while len(worker._lapse.unsaved) < 2:
            await wait_for(asyncio.Event(), 0.02)
    async with runtime.database.write() as transaction:
        await reap_pools(transaction, [pool.sampling.heartbeat.identity.id], BASE, runtime)
    returns, may_return = worker._lapse._return_samples, asyncio.Event()

    async def held() -> None:
        await may_return.wait()
        await returns()

    looks, look = asyncio.Semaphore(0), worker._start_samples

    async def counted() -> None:
        await look()
        looks.release()

    monkeypatch.setattr(worker._lapse, "_return_samples", held)
    monkeypatch.setattr(worker, "_start_samples", counted)
    renewal.is_renewal_only.set()
    renewal.is_back.set()
    async with asyncio.timeout(SECONDS):
        while not pool.sampling.heartbeat.may_draw:
            await wait_for(asyncio.Event(), 0.02)
        for _ in range(3):
            runtime.wakeups.announce(sampling_topic(BASE))
            await looks.acquire()
    assert await holders(runtime, sent) == {None}
    may_return.set()
    replica.running.set()
    for drawer, sample in zip(drawers, sent, strict=True):
        await drawer.result(sample)


async def test_a_sample_that_is_claimed_again_while_it_is_drawn_is_saved_at_its_processs_end(cluster: Rig) -> None:
    """A peer has reaped the pool and its lease is back at once, so nothing was cut. Two tenants' samples go on elsewhere."""
    pool, runtime = await cluster.pool(), cluster.runtime
    worker, replica, heartbeat = pool.sampling.worker, pool.source.replica, pool.sampling.heartbeat
    drawers = [Drawer(runtime, *sampler) for sampler in cluster.samplers]
    sent = [await drawer.send(5, tokens=60) for drawer in drawers]
    async with asyncio.timeout(SECONDS):
        while not set(sent) <= worker._drawn.keys() or replica.drawn < 20:
            await wait_for(asyncio.Event(), 0.02)
    replica.running.clear()
    async with runtime.database.write() as transaction:
        await reap_pools(transaction, [heartbeat.identity.id], BASE, runtime)
    await heartbeat.look()
    async with asyncio.timeout(SECONDS):
        while set(worker._claimed_again.values()) != {2} or len(worker._claimed_again) < 2:
            runtime.wakeups.announce(sampling_topic(BASE))
            await wait_for(asyncio.Event(), 0.02)
    await pool.end()
    for sample in sent:
        async with runtime.database.read() as session:
            saved = await saved_progress(session, sample)
        assert saved is not None
        assert saved.body
        assert not saved.is_stale
    await cluster.pool()
    for drawer, sample in zip(drawers, sent, strict=True):
        await drawer.result(sample)


async def holders(runtime: Runtime, samples: list[RequestId]) -> set[str | None]:
    """Return the processes that have claimed the samples."""
    async with runtime.database.read() as session:
        return set(await session.scalars(select(Operation.taken_by).where(Operation.id.in_(samples))))
