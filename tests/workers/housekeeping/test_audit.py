"""Housekeeping and the audit log: what it deletes of tenants' is told, each day gets its digest, and old days go."""

import asyncio
import logging
from datetime import date, timedelta

import pytest
from sqlalchemy import event, select

from contracts.ids import TenantId
from store.tables import AuditDigest, AuditEntry
from telemetry.security import LOGGER
from tenants import audit_digests
from tenants.audit import Actor, Door, record
from tenants.audit_actions import Action
from tenants.audit_digests import DayDigest, DayHash, undigested_day, verify
from tenants.rights import Role
from tenants.sessions import finish_session
from tests.workers.housekeeping.conftest import House
from workers.housekeeping import housekeeping
from workers.housekeeping.housekeeping import Housekeeping
from workers.housekeeping.schedule import StepName

PAGE = "audit_entries.resource_id"
"""Part of the statement that reads entries to hash them."""
ADA = Actor(Door.KEY, "tml-0123456789ab", 7, Role.ADMIN)


async def _entries(house: House) -> list[AuditEntry]:
    async with house.database.read() as session:
        return list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))


async def _write(house: House, name: str, tenant: TenantId | None = None) -> None:
    async with house.database.write() as transaction:
        await record(transaction, ADA, Action.KEY_CREATE, name, tenant=tenant, now=house.now)


async def _long_day(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a day of ten pages, of two tenants, that is over."""
    monkeypatch.setattr(audit_digests, "_PAGE", 2)
    for number in range(10):
        for tenant in ("cats", "dogs"):
            await _write(house, str(number), TenantId(tenant))
    house.now += timedelta(days=1)


async def _digest(house: House) -> str:
    """Return the digest of all entries, as they are hashed at once."""
    async with house.database.read() as session:
        return (await DayHash(date(2030, 1, 1), audit_digests.NO_DIGEST).finish(session)).digest


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


async def test_a_day_that_takes_longer_than_a_batch_gets_its_digest_and_its_entries_go(
    either_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of every batch is over after its third page."""
    house = either_house
    await _long_day(house, monkeypatch)
    pages = [0]

    def read(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        pages[0] += PAGE in statement
        if pages[0] > 3:
            raise TimeoutError

    event.listen(house.database.engine.sync_engine, "before_cursor_execute", read)
    runs = 0
    while runs < 10:
        pages[0], runs = 0, runs + 1
        (outcome,) = (await house.keeping.sweep([StepName.DIGEST_AUDIT], until_done=True)).values()
        if not isinstance(outcome, BaseException):
            break
    event.remove(house.database.engine.sync_engine, "before_cursor_execute", read)
    async with house.database.read() as session:
        (row,) = await session.scalars(select(AuditDigest))
        found = await verify(session, kept_since=date.min)
    assert (row.entries, row.digest) == (20, await _digest(house))
    assert (found.days, found.problems) == (1, [])
    house.now += house.runtime.settings.retention_audit
    await house.keeping.sweep([StepName.FORGET_AUDIT], until_done=True)
    assert await _entries(house) == []


async def test_a_batch_hashes_a_page_so_that_others_have_their_turns(
    either_house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = either_house
    await _long_day(house, monkeypatch)
    statements: list[str] = []
    event.listen(
        house.database.engine.sync_engine,
        "before_cursor_execute",
        lambda _connection, _cursor, statement, *_rest: statements.append(statement),
    )
    batch = await house.keeping._steps.by_name[StepName.DIGEST_AUDIT].work(None)
    assert (batch.handled, batch.next) == (0, "more")
    assert sum(PAGE in statement for statement in statements) == 1


async def test_processes_that_hash_the_same_day_at_once_make_one_digest(
    either_house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One begins, another does all of it, and the first goes on; within each the step runs twice at once."""
    house = either_house
    caplog.set_level(logging.INFO, LOGGER)
    await _long_day(house, monkeypatch)
    expected = await _digest(house)
    one, other = house.keeping, Housekeeping(house.runtime, lambda: True)
    await one._steps.by_name[StepName.DIGEST_AUDIT].work(None)
    for process in (other, one):
        step = process._steps.by_name[StepName.DIGEST_AUDIT]
        while any(batch.next for batch in await asyncio.gather(step.work(None), step.work(None))):
            pass
    # A third one comes too late, with entries that have expired meanwhile.
    await one._steps._keep_digest(DayDigest(date(2030, 1, 1), 18, "0" * 64))
    async with house.database.read() as session:
        assert await undigested_day(session) is None
        (row,) = await session.scalars(select(AuditDigest))
    assert (row.entries, row.digest) == (20, expected)
    (noted,) = [line.getMessage() for line in caplog.records if line.name == LOGGER]
    assert expected in noted


async def test_a_task_goes_on_with_a_long_day_when_other_steps_would_leave_the_rest_to_another_process(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TASK_SECONDS", "RUN_SECONDS"):
        monkeypatch.setattr(housekeeping, name, 0.0)
    await _long_day(house, monkeypatch)
    await house.keeping.run_if_due(StepName.DIGEST_AUDIT)
    async with house.database.read() as session:
        assert (await verify(session, kept_since=date.min)).entries == 20
