"""The orderly end of a sampling process, however long it takes: nobody takes it for dead, and what it saves stays saved."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import select

from contracts.base_model import read_base_model_facts
from contracts.errors import Unavailable
from contracts.ids import TenantId
from engine.model.base import BaseModel
from store.clock import utc_now
from store.database_clock import database_now
from store.repeat import wait_for
from store.tables import EndedProcess, Operation, WorkerProcess
from tests.workers.sampling.test_handed_over import BASE, LENGTH, SECONDS, Pool, Rig, rig_on
from workers.sampling import resumption
from workers.sampling.resumption import Resumption, Unfinished

LEASE = timedelta(seconds=3)
"""Short enough for a test to outlast it."""


@pytest_asyncio.fixture
async def cluster(migrated_postgres_url: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    async with rig_on(migrated_postgres_url, base, tmp_path, lease=LEASE) as made:
        yield made


async def outlast(rig: Rig, pool: Pool) -> None:
    """Wait until the pool's present lease has ended for as long again: a pool that lives takes it for dead, unless renewed."""
    mine = WorkerProcess.id == pool.sampling.heartbeat.identity.id
    async with rig.runtime.database.read() as session:
        ends = await session.scalar(select(WorkerProcess.expires_at).where(mine))
    assert ends is not None
    async with asyncio.timeout(SECONDS):
        while True:
            async with rig.runtime.database.read() as session:
                if await database_now(session, utc_now) > ends + LEASE:
                    return
            await wait_for(asyncio.Event(), 0.05)


async def test_a_pool_that_ends_in_order_for_longer_than_its_lease_is_not_taken_for_dead(
    cluster: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample counts a death, and the next pool goes on with the tokens that were saved."""
    first, save = await cluster.pool(), resumption.save_progress

    async def slow(*arguments: Any) -> None:
        await outlast(cluster, first)
        await save(*arguments)

    async with cluster.stream(0) as mine, cluster.stream(1, temperature=0.0) as beside:
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        first.source.replica.running.clear()
        second = await cluster.pool()
        async with asyncio.timeout(SECONDS):
            while not second.sampling.heartbeat._heartbeat.may_declare_dead:
                await wait_for(asyncio.Event(), 0.05)
        monkeypatch.setattr(resumption, "save_progress", slow)
        first.sampling.worker.stop()
        async with asyncio.timeout(SECONDS):
            await first.task
            monkeypatch.setattr(resumption, "save_progress", save)
            first.source.replica.running.set()
            whole, greedy = await asyncio.gather(*reading)
        assert (mine.tokens, beside.tokens) == (whole, greedy)
        assert second.source.replica.drawn <= 2 * (LENGTH - 20)
    async with cluster.runtime.database.read() as session:
        assert list(await session.scalars(select(EndedProcess.id))) == []
        assert set(await session.scalars(select(Operation.attempts))) == {0}


def unfinished(name: str, tokens: int) -> Unfinished:
    operation: Any = SimpleNamespace(id=name, tenant=TenantId(f"tenant of {name}"))
    continuation: Any = SimpleNamespace(made=tokens)
    history: Any = None
    return operation, continuation, history


async def test_tokens_are_saved_in_transactions_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that is larger is saved alone. One transaction that fails leaves unsaved what it and later ones would save."""
    saved: list[list[str]] = []

    class Failing(Resumption):
        async def _save_some(self, unfinished: Any, process: str) -> None:
            if len(saved) == 3:
                raise Unavailable("the database is away")
            saved.append([operation.id for operation, _, _ in unfinished])

    monkeypatch.setattr(resumption, "_TOKENS_AT_ONCE", 100)
    runtime: Any = None
    samples = [("a", 60), ("b", 40), ("none", 0), ("c", 1), ("large", 1000), ("d", 50), ("e", 60)]
    left = await Failing(runtime).save_at_end([unfinished(*one) for one in samples], process="pool")
    assert saved == [["a", "b"], ["c"], ["large"]]
    assert left == [("tenant of d", "d"), ("tenant of e", "e")]
