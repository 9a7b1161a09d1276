"""Samples of a process whose lease lapses and comes back, as in an outage of the database: they go on where they were."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.base_model import read_base_model_facts
from contracts.errors import Unavailable
from engine.model.base import BaseModel
from store.repeat import wait_for
from tests.workers.sampling.test_handed_over import BASE, BRIEF_LEASE, LENGTH, SECONDS, Pool, Rig, rig_on


@pytest_asyncio.fixture
async def cluster(migrated_postgres_url: str, tiny_model_dir: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    base = BaseModel.load(read_base_model_facts(BASE, tiny_model_dir, None))
    async with rig_on(migrated_postgres_url, base, tmp_path, lease=BRIEF_LEASE) as made:
        yield made


class LateRenewal:
    """Renewals of a pool's lease: they fail, or they wait while all else of the database works, until it is back."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        heartbeat = pool.sampling.heartbeat._heartbeat
        self._renew = heartbeat.renew
        self.is_renewal_only = asyncio.Event()
        """Set once all of the database but the renewal works again."""
        self.is_back = asyncio.Event()
        monkeypatch.setattr(heartbeat, "renew", self._late)

    async def _late(self) -> None:
        if not self.is_renewal_only.is_set():
            raise Unavailable("the database is away")
        await self.is_back.wait()
        await self._renew()


async def swept(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pool's worker sweep now, and wait for the sweep's end."""
    worker, claims, has_swept = pool.sampling.worker, pool.sampling.worker._claims, asyncio.Event()
    sweep = claims.sweep

    async def told(known: Any) -> None:
        await sweep(known)
        has_swept.set()

    monkeypatch.setattr(claims, "sweep", told)
    async with asyncio.timeout(SECONDS):
        while not has_swept.is_set():
            # A look that goes on sets the time of its own sweep at its end.
            worker._swept_at = float("-inf")
            worker._look_again.set()
            await wait_for(asyncio.Event(), 0.02)


async def test_a_sweep_before_the_lease_is_renewed_takes_no_samples_tokens(
    cluster: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both tenants' streams are unbroken, and nothing is drawn twice. The log tells once of all that were cut."""
    async with cluster.stream(0) as mine, cluster.stream(1) as beside:
        # Both wait by now, and are drawn together.
        pool = await cluster.pool()
        worker = pool.sampling.worker
        reading = [asyncio.create_task(one.read()) for one in (mine, beside)]
        await mine.until(20)
        await beside.until(20)
        pool.source.replica.running.clear()
        renewal = LateRenewal(pool, monkeypatch)
        async with asyncio.timeout(SECONDS):
            while len(worker._lapse.unsaved) < 2:
                await wait_for(asyncio.Event(), 0.02)
        left = sum(LENGTH - continuation.made for _, continuation, _ in worker._lapse.unsaved)
        drawn = pool.source.replica.drawn
        renewal.is_renewal_only.set()
        await swept(pool, monkeypatch)
        renewal.is_back.set()
        pool.source.replica.running.set()
        async with asyncio.timeout(SECONDS):
            ends = await asyncio.gather(*reading)
        assert [mine.tokens, beside.tokens] == ends
        assert pool.source.replica.drawn - drawn <= left
        (told,) = [
            one.getMessage() for one in caplog.records if "the lease was not renewed in time" in one.getMessage()
        ]
        assert "2 samples are cut" in told
