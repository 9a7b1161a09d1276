"""The audit log: one entry a change, in its transaction; nothing changes an entry, and the digests find who does."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import delete, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError

from contracts.ids import TenantId
from store.database import Database, create_engine
from store.tables import AuditDigest, AuditEntry
from tenants import audit_digests
from tenants.audit import Actor, Door, bounded, record, record_many
from tenants.audit_actions import Action
from tenants.audit_digests import (
    Verification,
    begin_digest,
    close_day,
    expire_entries,
    store_digest,
    undigested_day,
    verify,
)
from tenants.audit_log import AuditFilter, read_entries
from tenants.projects import create_project
from tenants.sessions import NewSession, create_session
from tenants.tenant_names import create_tenant

FIRST = datetime(2030, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
CATS, DOGS = TenantId("cats"), TenantId("dogs")
ADA = Actor(Door.KEY, "tml-0123456789ab", 7, "admin", "10.0.0.1", "0" * 32)


@dataclass
class Log:
    """An audit log, and ways to write into it and around it."""

    database: Database

    async def write(self, at: datetime, *names: str, tenant: TenantId = CATS) -> None:
        """Write an entry for each name, in one transaction."""
        async with self.database.write() as transaction:
            for name in names:
                await record(transaction, ADA, Action.KEY_CREATE, name, tenant=tenant, now=at, after={"note": name})

    async def digest(self, now: datetime) -> list[date]:
        """Close and hash every day that is over; return the days."""
        done = []
        while True:
            async with self.database.write() as transaction:
                if await close_day(transaction, now=now) is None:
                    return done
            async with self.database.read() as session:
                day = await undigested_day(session)
                assert day is not None
                found = await (await begin_digest(session, day)).finish(session)
            async with self.database.write() as transaction:
                await store_digest(transaction, found)
            done.append(day)

    async def verified(self, *, kept_since: date = date.min) -> Verification:
        async with self.database.read() as session:
            return await verify(session, kept_since=kept_since)

    async def names(self) -> list[str]:
        async with self.database.read() as session:
            return list(await session.scalars(select(AuditEntry.resource_id).order_by(AuditEntry.id)))

    async def count(self) -> int:
        async with self.database.read() as session:
            return await session.scalar(select(func.count()).select_from(AuditEntry)) or 0

    async def run(self, *statements: str) -> None:
        async with self.database.write() as transaction:
            for statement in statements:
                await transaction.execute(text(statement))

    async def with_triggers_off(self, *statements: str) -> None:
        """Run statements as somebody does who may change the schema."""
        if self.database.has_one_service:
            async with self.database.read() as session:
                rows = await session.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"))
                triggers = {row.name: row.sql for row in rows}
            off = [f"DROP TRIGGER {name}" for name in triggers]
            await self.run(*off, *statements, *triggers.values())
        else:
            tables = ("audit_entries", "audit_digests")
            off = [f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in tables]
            on = [f"ALTER TABLE {table} ENABLE TRIGGER USER" for table in tables]
            await self.run(*off, *statements, *on)


@pytest_asyncio.fixture
async def log(database_url: str) -> AsyncIterator[Log]:
    database = Database(create_engine(database_url))
    yield Log(database)
    await database.close()


async def test_a_change_that_is_rolled_back_leaves_no_entry(log: Log) -> None:
    async def broken() -> None:
        async with log.database.write() as transaction:
            await record(transaction, ADA, Action.KEY_CREATE, "k", tenant=CATS, now=FIRST)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await broken()
    assert await log.count() == 0


async def test_an_entry_tells_who_did_what_to_which_thing(log: Log) -> None:
    await log.write(FIRST, "tml-1")
    async with log.database.read() as session:
        (entry,) = await session.scalars(select(AuditEntry))
    assert (entry.actor, entry.key_id, entry.role, entry.door) == ("tml-0123456789ab", 7, "admin", "key")
    assert (entry.action, entry.resource, entry.resource_id, entry.outcome) == ("key_create", "key", "tml-1", "done")
    assert (entry.at, entry.day, entry.address, entry.trace_id) == (FIRST, FIRST.date(), "10.0.0.1", "0" * 32)
    assert (entry.tenant_id, entry.before, entry.after) == ("cats", None, {"note": "tml-1"})


async def test_many_entries_are_as_those_written_one_by_one(log: Log) -> None:
    """More than one statement writes, in order, of an open and of a closed day; one session has a project, the other none."""
    async with log.database.write() as transaction:
        tenant = await create_tenant(transaction, name="cats", clock=lambda: FIRST)
        project = await create_project(transaction, tenant, "paper", lambda: FIRST)
        sessions = [
            await create_session(transaction, tenant, NewSession([], None, "", of, None), lambda: FIRST)
            for of in (project.id, None)
        ]
    resources = [(f"{number}", session) for number in range(101) for session in (*sessions, "unknown")]
    await log.write(FIRST, "a day")
    await log.digest(FIRST + DAY)
    for at in (FIRST, FIRST + DAY):
        written = []
        for is_many in (True, False):
            async with log.database.write() as transaction:
                if is_many:
                    await record_many(transaction, ADA, Action.CHECKPOINT_DELETE, resources, tenant=tenant, now=at)
                else:
                    for name, session in resources:
                        more = {"tenant": tenant, "now": at, "session_id": session}
                        await record(transaction, ADA, Action.CHECKPOINT_DELETE, name, **more)  # type: ignore[arg-type]
            async with log.database.read() as reading:
                rows = (await reading.scalars(select(AuditEntry).order_by(AuditEntry.id))).all()
            names = [column.name for column in AuditEntry.__table__.c if column.name != "id"]
            written.append([[getattr(row, name) for name in names] for row in rows[-len(resources) :]])
        assert written[0] == written[1]
        assert {row.day for row in rows[-len(resources) :]} == {FIRST.date() + DAY}
        assert [row.project for row in rows[-3:]] == [project.id, tenant, None]
    assert (await log.verified()).problems == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_entries SET actor = 'somebody else'",
        "DELETE FROM audit_entries",
        "UPDATE audit_digests SET digest = 'another'",
        "UPDATE audit_digests SET entries = 0",
        "DELETE FROM audit_digests",
    ],
)
async def test_no_statement_changes_what_is_written(log: Log, statement: str) -> None:
    await log.write(FIRST, "one", "two")
    await log.digest(FIRST + DAY)
    with pytest.raises(DBAPIError, match="only grows"):
        await log.run(statement)
    assert (await log.names(), (await log.verified()).problems) == (["one", "two"], [])


async def test_no_statement_empties_or_replaces_the_tables(log: Log) -> None:
    await log.write(FIRST, "one")
    await log.digest(FIRST + DAY)
    is_sqlite = log.database.has_one_service
    for table in ("audit_entries", "audit_digests"):
        emptied = f"REPLACE INTO {table} SELECT * FROM {table}" if is_sqlite else f"TRUNCATE {table}"
        with pytest.raises(DBAPIError, match="only grows"):
            await log.run(emptied)
    assert await log.names() == ["one"]


async def test_the_chain_holds_over_days_without_entries_and_tells_its_newest_digest(log: Log) -> None:
    await log.write(FIRST, "one", "two")
    await log.write(FIRST + 3 * DAY, "three", tenant=DOGS)
    assert await log.digest(FIRST + 3 * DAY) == [date(2030, 1, 1)]
    assert await log.digest(FIRST + 4 * DAY) == [date(2030, 1, 4)]
    assert await log.digest(FIRST + 4 * DAY) == []
    found = await log.verified()
    assert (found.days, found.entries, found.problems) == (2, 3, [])
    assert found.last is not None
    assert (found.last.day, len(found.last.digest)) == (date(2030, 1, 4), 64)


FORGED = (
    "INSERT INTO audit_entries (at, day, actor, door, action, resource, resource_id, outcome) "
    "VALUES ('2030-01-01 13:00:00', '2030-01-01', 'x', 'key', 'key_create', 'key', 'forged', 'done')"
)


@pytest.mark.parametrize(
    ("tampering", "found"),
    [
        (("DELETE FROM audit_entries WHERE resource_id = 'two'",), "2030-01-01: the digest was made of 2 entries"),
        (("UPDATE audit_entries SET actor = 'eve' WHERE resource_id = 'one'",), "2030-01-01: an entry"),
        (("UPDATE audit_entries SET \"after\" = '{}' WHERE resource_id = 'one'",), "2030-01-01: an entry"),
        ((FORGED,), "2030-01-01: the digest was made of 2 entries, and there are 3"),
        (("DELETE FROM audit_digests WHERE day = '2030-01-01'",), "2030-01-01: 2 entries and no digest"),
        (
            (
                "DELETE FROM audit_entries WHERE day = '2030-01-01'",
                "DELETE FROM audit_digests WHERE day = '2030-01-01'",
            ),
            "2030-01-02: an entry, or the digest before",
        ),
    ],
)
async def test_verification_finds_what_was_done_with_the_triggers_off(log: Log, tampering: tuple, found: str) -> None:
    await log.write(FIRST, "one", "two")
    await log.write(FIRST + DAY, "three")
    await log.digest(FIRST + 2 * DAY)
    assert (await log.verified()).problems == []
    await log.with_triggers_off(*tampering)
    problems = (await log.verified()).problems
    assert any(problem.startswith(found) for problem in problems), problems


async def test_an_entry_for_a_day_that_is_closed_goes_to_the_next(log: Log) -> None:
    """A process whose clock is slow, or that took its time from before midnight."""
    await log.write(FIRST, "one")
    await log.digest(FIRST + DAY)
    await log.write(FIRST, "late")
    async with log.database.read() as session:
        late = await session.scalar(select(AuditEntry).where(AuditEntry.resource_id == "late"))
    assert (late.at, late.day) == (FIRST, date(2030, 1, 2))
    assert await log.digest(FIRST + 2 * DAY) == [date(2030, 1, 2)]
    assert (await log.verified()).problems == []


async def test_closing_a_day_waits_for_the_transactions_that_write_into_it(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has written before the closing and commits after it began; one comes while the day is being closed."""
    if log.database.has_one_service:
        pytest.skip("SQLite has one writer")
    monkeypatch.setattr(audit_digests, "_NOT_FOR_LONG", text("SET LOCAL lock_timeout = '300s'"))
    await log.write(FIRST, "one")
    async with log.database.write() as slow:
        await slow.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        await record(slow, ADA, Action.KEY_CREATE, "in flight", tenant=CATS, now=FIRST)
        closing = asyncio.create_task(log.digest(FIRST + DAY))
        await _until_waiting(log, "LOCK TABLE%")
        late = asyncio.create_task(log.write(FIRST, "queued"))
        await _until_waiting(log, "INSERT INTO audit_entries%")
        assert not closing.done()
    assert await closing == [date(2030, 1, 1)]
    await late
    found = await log.verified()
    assert (found.entries, found.problems) == (2, [])
    assert await log.digest(FIRST + 2 * DAY) == [date(2030, 1, 2)]
    assert (await log.verified()).entries == 3


async def _until_waiting(log: Log, query: str) -> None:
    is_waiting = "datname = current_database() AND wait_event_type = 'Lock' AND query LIKE :query"
    waits = text(f"SELECT count(*) FROM pg_stat_activity WHERE {is_waiting}")
    async with asyncio.timeout(60):
        while True:
            async with log.database.read() as session:
                if await session.scalar(waits, {"query": query}):
                    return
            await asyncio.sleep(0.01)


async def test_old_days_expire_and_the_chain_goes_on(log: Log) -> None:
    await log.write(FIRST, "one", "two")
    await log.write(FIRST + DAY, "three")
    await log.write(FIRST + 2 * DAY, "open still")
    await log.digest(FIRST + 2 * DAY)
    before = date(2030, 1, 2)
    for left in (1, 1, 0):
        async with log.database.write() as transaction:
            assert await expire_entries(transaction, before=before, now=FIRST + 9 * DAY, most=1) == left
    assert await log.names() == ["three", "open still"]
    found = await log.verified(kept_since=before)
    assert (found.days, found.entries, found.expired_to, found.problems) == (1, 1, date(2030, 1, 1), [])


async def test_a_day_without_a_digest_never_expires(log: Log) -> None:
    await log.write(FIRST, "one")
    async with log.database.write() as transaction:
        assert await expire_entries(transaction, before=date(2031, 1, 1), now=FIRST + 400 * DAY, most=9) == 0
    with pytest.raises(DBAPIError, match="only grows"):
        await log.run("DELETE FROM audit_entries")


async def test_verification_tells_of_days_that_were_let_go_before_their_time(log: Log) -> None:
    """The triggers let go what is marked as expired; whoever marks a young day is found by its age."""
    await log.write(FIRST, "one")
    await log.digest(FIRST + DAY)
    async with log.database.write() as transaction:
        await transaction.execute(update(AuditDigest).values(expired_at=FIRST + DAY))
        await transaction.execute(delete(AuditEntry))
    assert (await log.verified(kept_since=date(2030, 1, 2))).problems == []
    (problem,) = (await log.verified(kept_since=date(2030, 1, 1))).problems
    assert problem.startswith("2030-01-01: its entries were let go before their time")


async def test_a_digest_can_be_computed_by_anybody_from_the_entries(log: Log) -> None:
    """The line format is a promise: a stranger with an export proves the digest with SHA-256 alone."""
    await log.write(FIRST, "one")
    await log.digest(FIRST + DAY)
    async with log.database.read() as session:
        (entry,) = await session.scalars(select(AuditEntry))
        (digest,) = await session.scalars(select(AuditDigest.digest))
    columns = {column.name: getattr(entry, column.name) for column in AuditEntry.__table__.columns}
    columns |= {"at": "2030-01-01T12:00:00+00:00", "day": "2030-01-01"}
    lines = [{"day": "2030-01-01", "previous": ""}, columns]
    written = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
    assert hashlib.sha256(written.encode()).hexdigest() == digest


async def test_entries_are_bounded_and_hold_no_known_secret(log: Log) -> None:
    secret = "tml-0123456789ab-" + "s" * 50
    kept = bounded({"note": f"my key is {secret}", "long": "x" * 9000, "many": list(range(999)), "deep": {"a": {1, 2}}})
    assert kept is not None
    assert secret not in str(kept)
    assert (len(kept["long"]), len(kept["many"]), kept["deep"]) == (300, 50, {"a": [1, 2]})
    wide = bounded({f"name-{number}": "x" * 300 for number in range(50)})
    assert wide is not None
    assert wide["cut"] is True
    assert len(str(wide)) < 5000
    async with log.database.write() as transaction:
        await record(transaction, ADA, Action.KEY_CREATE, f"{secret}{'x' * 900}", tenant=CATS, now=FIRST, after=kept)
    (name,) = await log.names()
    assert (secret in name, len(name) <= 500) == (False, True)


async def test_ids_are_never_given_twice(log: Log) -> None:
    await log.write(FIRST, "one")
    await log.digest(FIRST + DAY)
    async with log.database.write() as transaction:
        await expire_entries(transaction, before=date(2031, 1, 1), now=FIRST + 400 * DAY, most=9)
    await log.write(FIRST + 400 * DAY, "two")
    async with log.database.read() as session:
        assert await session.scalar(select(AuditEntry.id)) == 2


async def test_a_look_at_a_rare_action_reads_its_entries_alone(log: Log) -> None:
    if log.database.has_one_service:
        pytest.skip("SQLite's planner does not know how rare an action is")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    common = {
        "day": now.date(),
        "tenant_id": None,
        "actor": "somebody",
        "door": "admin",
        "resource": "session",
        "resource_id": "one",
        "outcome": "done",
    }
    rows = [
        {**common, "at": now + timedelta(seconds=number), "action": "session_end" if number % 2000 else "base_accept"}
        for number in range(1, 6001)
    ]
    async with log.database.write() as transaction:
        await transaction.execute(insert(AuditEntry), rows)
    sent: list[tuple[str, Any]] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        sent.append((statement, parameters))

    await log.run("ANALYZE audit_entries")
    event.listen(log.database.engine.sync_engine, "before_cursor_execute", note)
    async with log.database.read() as session:
        page = await read_entries(session, AuditFilter(owner=None, actions=["base_accept"]), most=10)
        event.remove(log.database.engine.sync_engine, "before_cursor_execute", note)
        assert len(page.entries) == 3
        (statement, parameters) = sent[-1]
        connection = await session.connection()
        plan = str((await connection.exec_driver_sql(f"EXPLAIN {statement}", parameters)).all())
    assert "ix_audit_entries_action_at_id" in plan
