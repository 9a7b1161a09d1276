"""Replicas that answer and draw nothing: samples go elsewhere, and such a replica is left until it draws."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from contracts.errors import EngineFailure
from contracts.ledger_records import OperationState
from engine.model.base import BaseModel
from engine.sampling.replica import GenerateRequest, ReplicaHealth, SamplerReplica
from tests.workers.sampling.bare_samples import make_drawer
from tests.workers.sampling.test_handed_over import SECONDS, VOCABULARY, Rig, base, rig_on
from workers.sampling.sampler_wiring import BaseSampling, wire_sampling
from workers.torch_source import TorchSource

__all__ = ["base"]

BAD = 9


class FaultyReplica:
    """A replica that fails the requests that ``fails`` names. With ``hangs`` it draws nothing and says so."""

    def __init__(self, replica: SamplerReplica, name: str, fails: Callable[[GenerateRequest], bool]) -> None:
        self._replica = replica
        self.name = name
        self.fails = fails
        self.hangs = False
        self.probes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
        self.probes += request.request_id.startswith("probe")
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails(request):
            raise EngineFailure("the replica failed while it made the sequence")
        async for events in self._replica.generate(request):
            yield events

    async def health(self) -> ReplicaHealth:
        return replace(await self._replica.health(), hangs=self.hangs)


class FaultySource(TorchSource):
    """A source whose first replica ``fails``; those of later starts do not."""

    replica: FaultyReplica
    starts = 0
    own_name = ""
    fails: Callable[[GenerateRequest], bool]

    @property
    def name(self) -> str:
        return self.own_name

    async def start(self) -> Any:
        self.starts += 1
        fails = self.fails if self.starts == 1 else lambda _: False
        self.replica = FaultyReplica(await super().start(), self.own_name, fails)
        return self.replica


def source(rig: Rig, name: str, fails: Callable[[GenerateRequest], bool] = lambda _: False) -> FaultySource:
    made = FaultySource(rig.base, rig.runtime.settings)
    made.own_name, made.fails = name, fails
    return made


@asynccontextmanager
async def sampling_on(rig: Rig, sources: Sequence[FaultySource]) -> AsyncIterator[BaseSampling]:
    sampling = wire_sampling(rig.runtime, rig.facts, VOCABULARY, sources)
    await sampling.pool.start()
    working = asyncio.create_task(sampling.worker.run())
    try:
        yield sampling
    finally:
        sampling.worker.stop()
        await working
        await sampling.pool.close()


@pytest_asyncio.fixture
async def rig(migrated_database: Path, base: BaseModel, tmp_path: Path) -> AsyncIterator[Rig]:
    shutil.copy(migrated_database, tmp_path / "weft.db")
    async with rig_on(f"sqlite+aiosqlite:///{tmp_path}/weft.db", base, tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sampling.replica_pool.WATCH_SECONDS", 0.1)
    monkeypatch.setattr("workers.sampling.replica_pool.PROBE_SECONDS", 1.0)


async def test_a_sample_that_failed_on_a_replica_is_drawn_on_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sampling.replica_pool.WATCH_SECONDS", 10 * SECONDS)
    async with sampling_on(rig, [source(rig, "sick", lambda _: True), source(rig, "well")]):
        drawers = [await make_drawer(rig.runtime) for _ in range(8)]
        sent = [await drawer.send(5) for drawer in drawers]
        for drawer, request in zip(drawers, sent, strict=True):
            assert len((await drawer.result(request)).sequences) == 1


@pytest.mark.parametrize("fault", ["errors", "hangs"])
async def test_a_replica_that_draws_no_probe_takes_no_work_and_is_started_again(rig: Rig, fault: str) -> None:
    """Samples of two tenants wait for it, and do not fail."""
    only = source(rig, "sick", lambda _: fault == "errors")
    async with sampling_on(rig, [only]) as sampling:
        only.replica.hangs = fault == "hangs"
        while fault == "hangs" and sampling.pool.router.takes_work:
            await asyncio.wait_for(sampling.pool.router.wait_for_change(), SECONDS)
        drawers = [await make_drawer(rig.runtime) for _ in range(2)]
        sent = [await drawer.send(5) for drawer in drawers]
        for drawer, request in zip(drawers, sent, strict=True):
            assert len((await drawer.result(request)).sequences) == 1
        assert only.starts == 2


async def test_one_tenants_failures_do_not_take_a_replica_out_of_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.sampling.retry_patience._LONGEST_PAUSE_SECONDS", 0.3)
    only = source(rig, "well", lambda request: request.prompt[0] == BAD)
    async with sampling_on(rig, [only]):
        bad, neighbour = await make_drawer(rig.runtime), await make_drawer(rig.runtime)
        fails = await bad.send(BAD)
        ended = await rig.runtime.ledger.wait_until_final(bad.tenant, fails, seconds=SECONDS)
        assert ended.state is OperationState.FAILED
        assert len((await neighbour.result(await neighbour.send(5))).sequences) == 1
        assert only.replica.probes > 0
        assert only.starts == 1
