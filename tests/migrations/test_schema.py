"""Migrations make exactly the schema that ``store/tables`` describes, on both databases."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import IntegrityError

from migrations.upgrade import current_is_head, downgrade, sync_url, upgrade
from store.tables import Base


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'weft.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


def test_upgrade_path_equals_models(url: str) -> None:
    upgrade(url)
    engine = create_engine(sync_url(url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()
    assert current_is_head(url)


def test_downgrade_to_nothing_and_up_again(url: str) -> None:
    upgrade(url)
    downgrade(url, "base")
    engine = create_engine(sync_url(url))
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    engine.dispose()
    assert not current_is_head(url)
    upgrade(url)
    assert current_is_head(url)


def test_a_newest_schema_is_left_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command beside a service reads the revision: it waits for nobody who changes the schema, and runs no migration."""
    upgrade(url)
    with monkeypatch.context() as patch:
        patch.setattr("migrations.upgrade.command.upgrade", lambda *_: pytest.fail("Alembic ran"))
        upgrade(url)
    downgrade(url, "-1")
    upgrade(url)
    assert current_is_head(url)


def test_payloads_that_outlived_their_results_are_known_after_the_upgrade(url: str) -> None:
    upgrade(url, "0004")
    engine = create_engine(sync_url(url))
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO tenants VALUES ('cats', 'cats', 1.0, '2026-01-01 00:00:00')")
        for name, pruned in (("old", "'2026-01-02 00:00:00'"), ("young", "NULL")):
            connection.exec_driver_sql(
                "INSERT INTO operations (id, tenant_id, lane, seq_id, kind, base_model, state, body_digest, tokens, "
                f"created_at, pruned_at) VALUES ('{name}', 'cats', '{name}', 1, 'optim_step', 'b', 'done', '', 0, "
                f"'2026-01-01 00:00:00', {pruned})"
            )
            connection.exec_driver_sql(f"INSERT INTO operation_payloads VALUES ('{name}', 'cats', '')")
    upgrade(url, "0006")
    with engine.connect() as connection:
        kept = connection.exec_driver_sql("SELECT operation_id FROM operation_payloads WHERE kept_for_replay")
        assert kept.scalars().all() == ["old"]
    engine.dispose()


def test_operation_key_is_unique_in_the_database(tmp_path: Path) -> None:
    path = tmp_path / "weft.db"
    upgrade(f"sqlite+aiosqlite:///{path}")
    with sqlite3.connect(path) as connection:
        keys = {
            tuple(row[2] for row in connection.execute(f"PRAGMA index_info('{index[1]}')"))
            for index in connection.execute("PRAGMA index_list('operations')")
            if index[2]
        }
    assert ("lane", "seq_id") in keys


def test_a_url_with_tls_works_for_both_drivers() -> None:
    url = sync_url("postgresql+asyncpg://weft:x@db/weft?ssl=verify-full")
    assert url.render_as_string(hide_password=False) == "postgresql+psycopg://weft:x@db/weft?sslmode=verify-full"


def test_rows_of_before_rights_keep_theirs_and_sessions_name_projects_that_exist(url: str) -> None:
    upgrade(url, "0029")
    engine = create_engine(sync_url(url))
    now = "'2026-01-01 00:00:00'"
    session = f"'cats', '[]', '', 'any text', {now}, {now}"
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"INSERT INTO tenants (id, name, share, created_at) VALUES ('cats', 'c', 1.0, {now})"
        )
        connection.exec_driver_sql(
            "INSERT INTO api_keys (tenant_id, prefix, secret_hash, note, created_at) "
            f"VALUES ('cats', 'tml-1', 'hash', '', {now})"
        )
        columns = "tenant_id, tags, sdk_version, project_id, created_at, last_seen_at"
        connection.exec_driver_sql(f"INSERT INTO sessions (id, {columns}) VALUES ('old', {session})")
    upgrade(url)
    with engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT role, scopes, expires_at FROM api_keys").all() == [
            ("member", None, None)
        ]
        # A process of the old version goes on.
        connection.exec_driver_sql(f"INSERT INTO sessions (id, {columns}) VALUES ('new', {session})")
        assert connection.exec_driver_sql("SELECT project FROM sessions").scalars().all() == [None, None]
    with engine.connect() as connection:
        if url.startswith("sqlite"):
            connection.exec_driver_sql("PRAGMA foreign_keys=ON")
        with pytest.raises(IntegrityError):
            connection.exec_driver_sql("UPDATE sessions SET project = 'nowhere' WHERE id = 'old'")
    engine.dispose()
