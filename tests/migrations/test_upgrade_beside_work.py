"""Upgrades beside processes that work: each revision commits by itself, indexes hold up no writer, two upgrades are one."""

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import SQLAlchemyError

from migrations.online import LARGE_TABLES, build_index
from migrations.upgrade import current_is_head, sync_url, upgrade
from store.tables import Base

VERSIONS = Path(__file__).parents[2] / "migrations" / "versions"
DEADLINE = 90.0
_TABLE_AT = {"op.create_index": 1, "op.add_column": 0}
"""Place of the table's name among the arguments."""
INSERT = (
    "INSERT INTO operations (id, tenant_id, lane, seq_id, kind, base_model, state, body_digest, tokens, created_at) "
    "VALUES ('{0}', 'cats', '{0}', 1, 'optim_step', 'b', 'pending', '', 0, '2026-01-01 00:00:00')"
)
TENANT = "INSERT INTO tenants (id, name, share, created_at) VALUES ('cats', 'cats', 1.0, '2026-01-01 00:00:00')"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'weft.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


def psycopg_url(url: str) -> str:
    """Return the database's address as psycopg takes it."""
    return sync_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def test_a_revision_that_fails_leaves_those_before_it_applied(url: str) -> None:
    """Revision 9 finds its table there. What it would have made is not there, and the next try goes on from 8."""
    upgrade(url, "0006")
    engine = create_engine(sync_url(url))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE ix_download_links_expires_at (id INTEGER)")
    with pytest.raises(SQLAlchemyError):
        upgrade(url)
    with engine.begin() as connection:
        assert MigrationContext.configure(connection).get_current_revision() == "0008"
        assert "usage_days" in inspect(connection).get_table_names()
        assert "download_links" not in inspect(connection).get_table_names(), "the failed revision left nothing"
        connection.exec_driver_sql("DROP TABLE ix_download_links_expires_at")
    engine.dispose()
    upgrade(url)
    assert current_is_head(url)


def test_two_processes_upgrade_at_once(url: str) -> None:
    with ThreadPoolExecutor(3) as processes:
        for done in [processes.submit(upgrade, url) for _ in range(3)]:
            done.result(4 * DEADLINE)
    assert current_is_head(url)


def test_an_index_is_built_while_others_write(postgres_url: str) -> None:
    """A transaction that wrote before the build stays open. The build waits for it, and nobody waits for the build."""
    upgrade(postgres_url)
    address = psycopg_url(postgres_url)
    # The connections close before the thread is waited for: a build that waits for them would never end.
    with (
        ThreadPoolExecutor(1) as processes,
        psycopg.connect(address) as old,
        psycopg.connect(address, autocommit=True) as other,
    ):
        other.execute(TENANT)
        old.execute(INSERT.format("old"))
        built = processes.submit(_build, postgres_url)
        until(other, "wait_event_type = 'Lock' AND query LIKE 'CREATE INDEX CONCURRENTLY%'")
        other.execute("SET lock_timeout = '5s'")
        other.execute(INSERT.format("beside"))
        assert not built.done()
        old.commit()
        built.result(DEADLINE)
        valid = other.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_new'::regclass").fetchone()
        assert valid == (True,)


def test_a_build_that_was_cut_off_is_done_again(postgres_url: str) -> None:
    upgrade(postgres_url)
    with psycopg.connect(psycopg_url(postgres_url), autocommit=True) as other:
        other.execute("CREATE INDEX ix_new ON operations (created_at)")
        other.execute("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_new'::regclass")
        _build(postgres_url)
        _build(postgres_url)
        valid = other.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_new'::regclass").fetchone()
        assert valid == (True,)


def test_a_process_of_the_old_version_writes_all_through_the_upgrade(postgres_url: str) -> None:
    """The old process writes as revision 10 knows the tables, each row in a transaction of its own, and meets no error."""
    upgrade(postgres_url, "0010")
    with written_meanwhile(psycopg_url(postgres_url)) as count:
        upgrade(postgres_url)
        assert current_is_head(postgres_url)
    assert count[0] > 0


@contextmanager
def written_meanwhile(address: str) -> Iterator[list[int]]:
    """Write rows until the end of the block; yield their number, known after it. Raises what the writer met."""
    count, ending = [0], Event()

    def write() -> None:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("SET lock_timeout = '10s'")
            connection.execute(TENANT)
            while not ending.is_set():
                connection.execute(INSERT.format(count[0]))
                count[0] += 1

    with ThreadPoolExecutor(1) as processes:
        writer = processes.submit(write)
        try:
            yield count
        finally:
            ending.set()
            writer.result(DEADLINE)


def _build(url: str) -> None:
    """Build an index as a revision does."""
    engine = create_engine(sync_url(url))
    with engine.connect() as connection:
        migration = MigrationContext.configure(connection, opts={"transaction_per_migration": True})
        with Operations.context(migration), migration.begin_transaction(_per_migration=True):
            build_index("ix_new", "operations", ["created_at"])
    engine.dispose()


def until(connection: psycopg.Connection[tuple[object, ...]], condition: str) -> None:
    """Wait until a session of PostgreSQL fulfils the condition."""
    ticking, counted = Event(), f"SELECT count(*) FROM pg_stat_activity WHERE {condition}"
    for _ in range(int(DEADLINE / 0.05)):
        if connection.execute(counted.encode()).fetchone() != (0,):
            return
        ticking.wait(0.05)
    raise AssertionError("it did not begin to wait")


def test_revisions_change_large_tables_beside_the_writers() -> None:
    """Revisions from 11 on call ``migrations.online``. Earlier ones are of an empty or small service."""
    wrong = []
    for path in sorted(VERSIONS.glob("[0-9]*.py")):
        if int(path.name[:4]) < 11:
            continue
        steps = [step for step in ast.parse(path.read_text()).body if getattr(step, "name", "") != "downgrade"]
        calls = [node for step in steps for node in ast.walk(step) if isinstance(node, ast.Call)]
        # Nobody waits for the indexes of a table that is still empty.
        made = {ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "op.create_table"}
        for node in calls:
            if (place := _TABLE_AT.get(ast.unparse(node.func))) is not None:
                table = node.args[place] if len(node.args) > place else None
                if table is not None and ast.unparse(table) in made:
                    continue
                if not isinstance(table, ast.Constant) or table.value in LARGE_TABLES:
                    wrong.append(f"{path.name}:{node.lineno}")
    assert wrong == [], "call migrations.online"


def test_a_table_with_a_row_for_each_request_is_a_large_one() -> None:
    """Tables of unfinished requests stay small."""
    unfinished = {"sample_progress", "samples_in_flight", "checkpoint_holds"}
    keys = {name: [column.name for column in table.primary_key] for name, table in Base.metadata.tables.items()}
    of_requests = {name for name, key in keys.items() if key == ["operation_id"]}
    assert of_requests - unfinished <= LARGE_TABLES
    assert "sample_records" in of_requests
