"""A dispatch locks its sampler's version against a concurrent publication. PostgreSQL only: SQLite has one writer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import CheckpointId, RunId, SamplerId, SessionId, TenantId
from contracts.operations import LoraSettings
from contracts.paths import Segment
from store.clock import utc_now
from store.database import Database, create_engine
from store.tables import Checkpoint
from tenants.checkpoints import NewCheckpoint, new_checkpoint_id, record_checkpoint
from tenants.runs import NewRun
from tenants.sampled_versions import SampledVersion, held_versions, sampled_versions, versions_followed
from tenants.samplers import NewSampler, create_sampler, publish_live
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant
from testing.runs import create_run

BASE = "weft/tiny"


@dataclass
class LiveRun:
    """A tenant's run, with a live sampler on its only version."""

    database: Database
    tenant: TenantId
    run: RunId
    sampler: SamplerId
    version: CheckpointId

    async def record(self, transaction: AsyncSession) -> CheckpointId:
        """Add a version that no sampler follows yet."""
        return await record(transaction, self.tenant, self.run)

    async def publish(self) -> CheckpointId:
        """Add a version and publish it to the live sampler."""
        async with self.database.write() as publication:
            new = await self.record(publication)
            await publish_live(publication, self.tenant, self.run, new, utc_now)
        return new

    async def sampled(self) -> CheckpointId | None:
        """Read the sampled version in a transaction of its own."""
        async with asyncio.timeout(60):
            while True:
                async with self.database.write() as transaction:
                    if (found := await self.dispatched(transaction)) is not None:
                        return found.checkpoint

    async def dispatched(self, transaction: AsyncSession) -> SampledVersion | None:
        """Read and lock the sampled version as a dispatch in ``transaction`` does; None: it is locked."""
        (found,) = await held_versions(transaction, [(self.tenant, self.sampler)], utc_now)
        assert not isinstance(found, NotFound)
        return found


async def record(transaction: AsyncSession, tenant: TenantId, run: RunId) -> CheckpointId:
    version = new_checkpoint_id()
    new = NewCheckpoint(version, run, Segment.SAMPLER_WEIGHTS, version, 1, None, False, None)
    await record_checkpoint(transaction, tenant, new, utc_now)
    return version


@pytest.fixture
async def live(migrated_postgres_url: str) -> AsyncIterator[LiveRun]:
    database = Database(create_engine(migrated_postgres_url))
    async with database.write() as transaction:
        tenant = await create_tenant(transaction, name="one", clock=utc_now)
        session: SessionId = await create_session(transaction, tenant, NewSession([], None, "", None, None), utc_now)
        run = await create_run(transaction, tenant, NewRun(session, 0, BASE, LoraSettings(4, seed=1), None), utc_now)
        version = await record(transaction, tenant, run)
        sampler = await create_sampler(transaction, tenant, NewSampler(session, 0, BASE, None, version, run), utc_now)
    yield LiveRun(database, tenant, run, sampler, version)
    await database.close()


async def test_a_dispatch_behind_a_publication_gets_the_new_version(live: LiveRun) -> None:
    async with live.database.write() as publication:
        new = await live.record(publication)
        await publish_live(publication, live.tenant, live.run, new, utc_now)
        dispatch = asyncio.create_task(live.sampled())
        done, _ = await asyncio.wait([dispatch], timeout=1.0)
        assert not done
    assert await asyncio.wait_for(dispatch, 10) == new


async def test_a_publication_waits_for_a_dispatch(live: LiveRun) -> None:
    async with live.database.write() as dispatch:
        sampled = await live.dispatched(dispatch)
        assert sampled is not None
        assert sampled.checkpoint == live.version
        publishing = asyncio.create_task(live.publish())
        done, _ = await asyncio.wait([publishing], timeout=1.0)
        assert not done
    new = await asyncio.wait_for(publishing, 10)
    assert await live.sampled() == new


async def test_another_tenants_sampler_is_not_found_and_the_owners_beside_it_is(live: LiveRun) -> None:
    async with live.database.read() as session:
        asked = [(TenantId("another"), live.sampler), (live.tenant, live.sampler), (live.tenant, "missing")]
        theirs, own, missing = await sampled_versions(session, asked, utc_now)
    assert [type(found) for found in (theirs, own, missing)] == [NotFound, SampledVersion, NotFound]
    assert isinstance(own, SampledVersion)
    assert own.checkpoint == live.version


async def test_a_dispatch_draws_from_anothers_checkpoint_while_it_is_published_and_behind_no_gate(
    live: LiveRun,
) -> None:
    """A sample that was accepted while it was published, and waits still, draws from it no more."""
    async with live.database.write() as transaction:
        other = await create_tenant(transaction, name="other", clock=utc_now)
        opened = await create_session(transaction, other, NewSession([], None, "", None, None), utc_now)
        theirs = await create_sampler(transaction, other, NewSampler(opened, 0, BASE, None, live.version), utc_now)
    both = [(other, theirs), (live.tenant, live.sampler)]
    for public in (False, True, False):
        async with live.database.write() as transaction:
            of_version = update(Checkpoint).where(Checkpoint.id == live.version)
            await transaction.execute(of_version.values(public=public))
        async with live.database.write() as transaction:
            found, own = await held_versions(transaction, both, utc_now)
        if public:
            assert isinstance(found, SampledVersion)
            assert (found.checkpoint, found.run) == (live.version, None)
        else:
            assert isinstance(found, NotFound)
        assert isinstance(own, SampledVersion)
        assert (own.checkpoint, own.run) == (live.version, live.run)


async def test_a_publication_behind_another_counts_as_one_more_and_leaves_its_own_version(live: LiveRun) -> None:
    async with live.database.write() as first:
        await publish_live(first, live.tenant, live.run, await live.record(first), utc_now)
        second = asyncio.create_task(live.publish())
        done, _ = await asyncio.wait([second], timeout=1.0)
        assert not done
    last = await asyncio.wait_for(second, 10)
    async with live.database.write() as dispatch:
        sampled = await live.dispatched(dispatch)
    assert (sampled.checkpoint, sampled.publications) == (last, 2)


async def test_nobody_is_moved_to_a_version_that_is_gone(live: LiveRun) -> None:
    """No sampler moves to another tenant's version either. Publishing the followed version again moves no sampler."""
    async with live.database.write() as transaction:
        expired = await live.record(transaction)
        await transaction.execute(update(Checkpoint).where(Checkpoint.id == expired).values(expires_at=utc_now()))
        fresh = await live.record(transaction)
        asked = [(live.tenant, expired), (live.tenant, new_checkpoint_id()), (TenantId("another"), fresh)]
        moved = [await publish_live(transaction, tenant, live.run, one, utc_now) for tenant, one in asked]
        assert not any(moved)
        assert not await publish_live(transaction, live.tenant, live.run, live.version, utc_now)
        assert (await live.dispatched(transaction)).publications == 0
        assert await publish_live(transaction, live.tenant, live.run, fresh, utc_now)
        assert (await live.dispatched(transaction)).checkpoint == fresh


async def test_a_version_that_is_gone_is_not_followed_and_the_one_before_it_was(live: LiveRun) -> None:
    async with live.database.read() as session:
        followed = await versions_followed(session, [live.sampler, "missing"], utc_now)
    assert {sampler: found.checkpoint for sampler, found in followed.items()} == {live.sampler: live.version}
    async with live.database.write() as transaction:
        await transaction.execute(update(Checkpoint).values(expires_at=utc_now()))
    async with live.database.read() as session:
        assert await versions_followed(session, [live.sampler], utc_now) == {}
