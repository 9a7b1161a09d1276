"""Reloads make replicas load versions: each tenant has a few at a time, and their pace is counted before the work."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from api.weft import adapters
from contracts.ids import CheckpointId, RunId
from contracts.paths import Segment
from store.settings import Settings
from tests.api.conftest import BASE, Service, Tenant

CHANGES = 12
AT_ONCE = 4
DEADLINE = 60


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Settings with few changes an hour, and no room for archives."""
    return settings.model_copy(update={"tenant_changes": CHANGES, "limit_stored_bytes": 1})


@dataclass
class Loads:
    """Loads of versions that the replicas were asked for, which end once they may."""

    asked: list[RunId] = field(default_factory=list)
    stuck: set[RunId] = field(default_factory=set)
    """Runs whose versions do not load before ``may_end``."""
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def load(self, run: RunId, _version: CheckpointId) -> None:
        """Note the load, and end when it may."""
        async with self.changed:
            self.asked.append(run)
            self.changed.notify_all()
        if run in self.stuck:
            await self.may_end.wait()

    async def until(self, count: int) -> None:
        """Wait until so many loads were asked for."""
        async with asyncio.timeout(DEADLINE), self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= count)


@pytest.fixture
def loads(service: Service) -> Loads:
    """Loads of the service's one base model."""
    made = Loads()

    async def withdraw(_version: CheckpointId) -> None: ...

    service.services.runtime.publication.register(BASE, made.load, withdraw)  # type: ignore[attr-defined]
    return made


async def versioned(tenant: Tenant) -> RunId:
    """Make a run with a version for samplers."""
    run = await tenant.run()
    await tenant.checkpoint(run, "one", segment=Segment.SAMPLER_WEIGHTS)
    return run


async def reload(tenant: Tenant, run: RunId) -> httpx.Response:
    """Reload the run's version by its path."""
    path = f"tinker://{run}/sampler_weights/one"
    return await tenant.http.post(f"/adapters/{run}/reload", json={"path": path})


async def test_the_pace_refuses_a_reload_before_any_replica_loads_for_it(
    loads: Loads, cats: Tenant, dogs: Tenant
) -> None:
    run, theirs = await versioned(cats), await versioned(dogs)
    answers = [await reload(cats, run) for _ in range(CHANGES + 3)]
    assert [answer.status_code for answer in answers] == [200] * CHANGES + [429] * 3
    assert answers[-1].json()["code"] == "over_rate"
    assert loads.asked == [run] * CHANGES
    assert (await reload(dogs, theirs)).status_code == 200


async def test_a_reload_that_cannot_be_made_counts_to_no_pace(loads: Loads, cats: Tenant, dogs: Tenant) -> None:
    run, theirs = await versioned(cats), await versioned(dogs)
    answers = [await reload(cats, theirs) for _ in range(CHANGES + 1)]
    assert {answer.status_code for answer in answers} == {404}
    assert (await reload(cats, run)).status_code == 200
    assert loads.asked == [run]


async def test_the_pace_refuses_an_import_before_its_archive_is_looked_at(
    service: Service, loads: Loads, cats: Tenant, dogs: Tenant
) -> None:
    run = await versioned(cats)
    assert {(await reload(cats, run)).status_code for _ in range(CHANGES)} == {200}
    url, params = f"{service.url}/api/weft/v1/imports", {"base_model": BASE}
    answers = [await one.http.post(url, content=b"x" * 1000, params=params) for one in (cats, dogs)]
    assert [answer.json()["code"] for answer in answers] == ["over_rate", "storage_full"]


@pytest.fixture
async def waiting(cats: Tenant, loads: Loads) -> AsyncIterator[list["asyncio.Task[httpx.Response]"]]:
    """Reloads of cats, as many as may be in progress, whose loads do not end."""
    run = await versioned(cats)
    loads.stuck.add(run)
    tasks = [asyncio.create_task(reload(cats, run)) for _ in range(AT_ONCE)]
    await loads.until(AT_ONCE)
    yield tasks
    loads.may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tenant_has_few_reloads_in_progress_and_a_neighbour_has_its_own(
    loads: Loads,
    cats: Tenant,
    dogs: Tenant,
    waiting: list["asyncio.Task[httpx.Response]"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run,) = loads.stuck
    with monkeypatch.context() as patched:
        patched.setattr(adapters, "PATIENCE_SECONDS", 0.0)
        refused = await reload(cats, run)
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
    assert "reloads in progress" in refused.text
    assert loads.asked == [run] * AT_ONCE
    theirs = await versioned(dogs)
    assert (await reload(dogs, theirs)).status_code == 200
    loads.may_end.set()
    assert {(await task).status_code for task in waiting} == {200}
    # Nothing is lost: the one that was refused is taken when it is sent again.
    assert (await reload(cats, run)).status_code == 200
    assert loads.asked == [run] * AT_ONCE + [theirs, run]


async def test_a_further_reload_waits_for_its_turn(
    loads: Loads, cats: Tenant, waiting: list["asyncio.Task[httpx.Response]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "PATIENCE_SECONDS", DEADLINE)
    (run,) = loads.stuck
    further = asyncio.create_task(reload(cats, run))
    loads.may_end.set()
    assert {(await task).status_code for task in [*waiting, further]} == {200}
