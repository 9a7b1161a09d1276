"""Samples that are given back, and claimed anew by the same process before that is through; both databases."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from contracts.base_model import read_base_model_facts
from contracts.errors import Unavailable
from contracts.ledger_records import ReadyOperation
from engine.model.base import BaseModel
from ledger.runtime import Runtime
from store.clock import utc_now
from store.database import Database, create_engine
from tests.workers.runtimes import make_runtime
from tests.workers.sampling.bare_samples import SECONDS, make_drawer, make_sampling
from tests.workers.sampling.test_claims import BASE, RUN, Pools, make_pool
from workers.sampling.claims import HeldBack


@pytest.fixture
async def runtime(database_url: str, tmp_path: Path) -> AsyncIterator[Runtime]:
    database = Database(create_engine(database_url))
    yield make_runtime(database, tmp_path, utc_now)
    await database.close()


@pytest.fixture
async def pools(runtime: Runtime, tiny_model_dir: Path, tmp_path: Path) -> Pools:
    one, two = (make_pool(runtime, tiny_model_dir, tmp_path) for _ in range(2))
    for pool in (one, two):
        await pool.claims.heartbeat.look()
    return Pools(runtime, one, two)


async def test_a_repeated_give_back_takes_no_newer_claim_of_the_same_process(pools: Pools) -> None:
    """The answer to the first commit was lost. The neighbour's sample, which nobody claimed meanwhile, stays given back."""
    claims = pools.one.claims
    await pools.send("cats", 1)
    (mine,) = await pools.one.claim()
    await claims.give_back(mine, None)
    (again,) = await pools.one.claim()
    assert (again.id, again.claim) == (mine.id, mine.claim + 1)
    await pools.send("neighbour", 1)
    (beside,) = await pools.one.claim()
    for _ in range(2):
        await asyncio.gather(claims.give_back(mine, None), claims.give_back(beside, None))
    assert pools.counts(await pools.two.claim()) == {"neighbour": 1}


async def test_samples_are_given_back_once_though_their_gates_cannot_be_read(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database goes away behind the commit. The sample that a gate holds comes back at the next look at the gates."""
    claims, release, tries = pools.one.claims, pools.one.claims.release_open, 0

    async def fails_once() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Unavailable("the database is away")
        await release()

    monkeypatch.setattr(claims, "release_open", fails_once)
    await pools.send("paused", 1)
    await pools.send("neighbour", 1)
    mine, beside = await pools.one.claim()
    ends = (claims.give_back(mine, RUN), claims.give_back(beside, None))
    assert await asyncio.gather(*ends) == [None, None]
    assert pools.counts(await pools.two.claim()) == {"neighbour": 1}
    await claims.release_open()
    assert pools.counts(await pools.two.claim()) == {"paused": 1}


async def test_a_sample_that_is_claimed_anew_waits_for_its_gate_beside_its_old_claim(pools: Pools) -> None:
    """The room of both tenants is counted once."""
    claims = pools.one.claims
    await pools.send("cats", 1)
    (mine,) = await pools.one.claim()
    with pytest.raises(HeldBack), claims.waiting(mine):
        raise Unavailable("the database is away")
    await claims.give_back(mine, None)
    await pools.send("neighbour", 1)
    taken = {one.tenant: one for one in await pools.one.claim()}
    again, beside = (taken[pools.tenants[name]] for name in ("cats", "neighbour"))
    with claims.waiting(again):
        claims.ended(mine, tokens=0)
    assert claims._held == {again.tenant: 1, beside.tenant: 1}
    for operation in (again, beside):
        claims.ended(operation, tokens=0)
    assert (claims._held, claims._costs, claims._waiting) == ({}, {}, set())


async def test_a_sample_is_begun_anew_whenever_its_process_claims_what_it_has_given_back(
    runtime: Runtime, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first give-back ends while the second goes on. The neighbour's sample is no part of that."""
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    sampling = make_sampling(runtime, base, tiny_model_dir)
    await sampling.pool.start()
    await sampling.heartbeat.look()
    worker, claims = sampling.worker, sampling.worker._claims
    drawer, neighbour = await make_drawer(runtime), await make_drawer(runtime)
    mine, beside = await drawer.send(5), await neighbour.send(6)
    give_back, may_end = claims.give_back, {number: asyncio.Event() for number in (1, 2, 3)}
    begun, given, on = [], {number: asyncio.Event() for number in (1, 2, 3)}, asyncio.Event()

    async def outcome(operation: ReadyOperation) -> None:
        if operation.id == beside:
            await on.wait()
            return
        begun.append(operation.claim)
        raise HeldBack

    async def late(operation: ReadyOperation, gate: None) -> None:
        await give_back(operation, gate)
        given[operation.claim].set()
        await may_end[operation.claim].wait()

    monkeypatch.setattr(worker, "_outcome", outcome)
    monkeypatch.setattr(claims, "give_back", late)
    async with asyncio.timeout(SECONDS):
        await worker._start_samples()
        tasks = [worker._in_flight[mine]]
        await given[1].wait()
        await worker._start_samples()
        await given[2].wait()
        may_end[1].set()
        await asyncio.wait(tasks)
        await worker._start_samples()
        await given[3].wait()
        assert begun == [1, 2, 3]
        tasks += [*worker._in_flight.values()]
        for event in (*may_end.values(), on):
            event.set()
        await asyncio.gather(*tasks)
    assert (await drawer.row(mine)).taken_by is None
    assert (await neighbour.row(beside)).claims == 1
    await sampling.pool.close()
