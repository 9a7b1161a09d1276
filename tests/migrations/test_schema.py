"""The upgrade path is the schema: what migrations make is what the models say, on both databases."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from migrations.upgrade import current_is_head, downgrade, sync_url, upgrade
from tenants.models import Base


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
