"""Housekeeping and the audit log: what it deletes of tenants' is told, each day gets its digest, and old days go."""

import logging
from datetime import date, timedelta

import pytest
from sqlalchemy import select

from store.tables import AuditDigest, AuditEntry
from telemetry.security import LOGGER
from tenants.audit import Actor, Door, record
from tenants.audit_actions import Action
from tenants.audit_digests import verify
from tenants.rights import Role
from tenants.sessions import finish_session
from tests.workers.housekeeping.conftest import House

ADA = Actor(Door.KEY, "tml-0123456789ab", 7, Role.ADMIN)


async def _entries(house: House) -> list[AuditEntry]:
    async with house.database.read() as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


async def _write(house: House, name: str) -> None:
    async with house.database.write() as transaction:
        await record(transaction, ADA, Action.KEY_CREATE, name, tenant=None, now=house.now)


async def test_a_checkpoint_whose_time_is_over_is_told_once_and_versions_are_not(either_house: House) -> None:
    house = either_house
    tenant, _, run = await house.run("first")
    other, _, other_run = await house.run("second")
    await house.checkpoint(tenant, run, "named", ttl=60)
    await house.checkpoint(tenant, run, "step-1", ttl=60, listed=False)
    kept = await house.checkpoint(other, other_run, "kept")
    house.now += timedelta(seconds=61)
    for _ in range(2):
        await house.empty_trash()
    (entry,) = await _entries(house)
    told = (entry.action, entry.actor, entry.door, entry.resource_id, entry.tenant_id, entry.project)
    path = f"tinker://{run}/sampler_weights/named"
    assert told == ("checkpoint_expire", "housekeeping", "service", path, tenant, tenant)
    assert entry.before is not None
    assert entry.before["size_bytes"] == 1
    assert await house.checkpoints() == {kept}


async def test_a_run_that_is_deleted_is_told(either_house: House) -> None:
    house = either_house
    tenant, session, run = await house.run("first")
    await house.run("second")
    async with house.database.write() as transaction:
        await finish_session(transaction, tenant, session, reason="finished", detail=None, clock=house.clock)
    house.now += timedelta(hours=2)
    await house.sweep()
    house.now += house.runtime.settings.retention_runs
    await house.sweep()
    deleted = [one for one in await _entries(house) if one.action == Action.RUN_DELETE]
    assert [(one.resource_id, one.tenant_id, one.actor) for one in deleted][:1] == [(run, tenant, "housekeeping")]


async def test_each_day_gets_its_digest_which_the_security_log_has_too(
    either_house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house = either_house
    caplog.set_level(logging.INFO, LOGGER)
    await _write(house, "one")
    house.now += timedelta(days=1)
    await _write(house, "two")
    house.now += timedelta(days=3)
    await _write(house, "today")
    for _ in range(2):
        await house.sweep()
    async with house.database.read() as session:
        digests = list(await session.scalars(select(AuditDigest).order_by(AuditDigest.day)))
        found = await verify(session, kept_since=date.min)
    assert [(row.day, row.entries) for row in digests] == [(date(2030, 1, 1), 1), (date(2030, 1, 2), 1)]
    assert (found.days, found.entries, found.problems) == (2, 2, [])
    noted = [line.getMessage() for line in caplog.records if line.name == LOGGER]
    assert len(noted) == 2
    assert all(
        row.digest and row.digest in line and str(row.day) in line for row, line in zip(digests, noted, strict=True)
    )


async def test_old_days_go_and_their_digests_stay(either_house: House) -> None:
    house = either_house
    await _write(house, "old")
    house.now += timedelta(days=1)
    await _write(house, "kept")
    house.now += house.runtime.settings.retention_audit
    await house.sweep()
    assert [one.resource_id for one in await _entries(house)] == ["kept"]
    async with house.database.read() as session:
        kept_since = (house.now - house.runtime.settings.retention_audit).date()
        found = await verify(session, kept_since=kept_since)
        digests = list(await session.scalars(select(AuditDigest.day).order_by(AuditDigest.day)))
    assert digests == [date(2030, 1, 1), date(2030, 1, 2)]
    assert (found.days, found.expired_to, found.problems) == (1, date(2030, 1, 1), [])
