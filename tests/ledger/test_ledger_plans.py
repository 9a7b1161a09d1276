"""Query plans of the ledger's statements: none scans a whole table, on either database."""

import re
import shutil
import sqlite3
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, insert, make_url

from bench.growth.calls import GrowthCalls
from bench.growth.ledger_group import ledger_group
from bench.ledger.calls import LedgerCalls
from bench.ledger.plans import PARTIAL_INDEXES, Sent, explain, hot_statements, is_sequential, recorded, rows_in_vain
from bench.ledger.rows import LedgerRows, copy_into, tables_of
from migrations.upgrade import sync_url
from store.clock import utc_now
from store.tables import Base

ROWS = 20_000
TENANTS = 32
STALE = 20
"""Prunable operations: few, since PostgreSQL rightly scans a small table rather than look up a large part of it."""
MOST_IN_VAIN = 200
"""Most rows that a plan's node may read and discard. Only pending rows qualify, and there are few."""


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have operators' lists of done operations search a small part of the table, as they do of a large one."""
    monkeypatch.setattr("ledger.inspection.SEARCHED", ROWS // 100)


@pytest.fixture
def made() -> LedgerRows:
    return LedgerRows(ROWS, TENANTS, utc_now(), stale=STALE)


async def every_statement(url: str, made: LedgerRows) -> list[Sent]:
    """Return the statements of every call of the ledger: of the hot ones, and of ends from outside and operators."""
    calls = LedgerCalls(url, made, utc_now)
    found = await hot_statements(calls)
    await calls.close()
    seldom = GrowthCalls(url, made, ledger_group, lambda _calls, _years: ({}, {}))
    for timed in seldom.all:
        with recorded(timed.database.engine, timed.name) as sent:
            await timed.call()
        found.extend(sent)
    await seldom.close()
    return found


async def test_postgresql_stays_on_indexes(migrated_postgres_url: str, made: LedgerRows) -> None:
    address = make_url(migrated_postgres_url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address, autocommit=True) as connection:
        copy_into(connection, made)
        statements = await every_statement(migrated_postgres_url, made)
        plans = [
            (sent.name, explain(connection, sent, generic=generic)) for sent in statements for generic in (False, True)
        ]
    assert len(statements) > 60
    assert [named for named in plans if is_sequential(named[1]) and not _is_bounded(named[0])] == []
    assert [named for named in plans if rows_in_vain(named[1]) > MOST_IN_VAIN] == []


async def test_sqlite_stays_on_indexes(migrated_database: Path, tmp_path: Path, made: LedgerRows) -> None:
    path = tmp_path / "weft.db"
    shutil.copy(migrated_database, path)
    url = f"sqlite+aiosqlite:///{path}"
    engine = create_engine(sync_url(url))
    with engine.begin() as connection:
        for name, rows in tables_of(made):
            connection.execute(insert(Base.metadata.tables[name]), rows)
    engine.dispose()
    statements = await every_statement(url, made)
    scans: list[tuple[str, str]] = []
    with sqlite3.connect(path) as database:
        for sent in statements:
            plan = database.execute(f"EXPLAIN QUERY PLAN {sent.text}", sent.parameters).fetchall()
            scans += [(sent.name, str(row[3])) for row in plan if _is_scan(str(row[3])) and not _is_bounded(sent.name)]
    database.close()
    assert len(statements) > 60
    assert scans == []


def _is_bounded(name: str) -> bool:
    """Return True for an operator's list of done operations: it reads the newest ``SEARCHED`` and no more."""
    return name.startswith("list_done")


def _is_scan(step: str) -> bool:
    """Return True for a scan of a ledger table, or of an index that holds all of its rows."""
    return bool(re.match(r"SCAN operation", step)) and not PARTIAL_INDEXES.search(step)
