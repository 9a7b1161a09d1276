"""A database that a test gets is as new, whatever the test before it left."""

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import make_url

from testing.emptied_databases import EmptiedDatabases

MAKE = (
    "INSERT INTO operator_keys (prefix, created_at, secret_hash, note) VALUES ('cats', now(), 'hash', '') RETURNING id"
)


@pytest.fixture
def databases(migrated_postgres: str) -> Iterator[EmptiedDatabases]:
    """Databases that no other test has used."""
    with EmptiedDatabases(migrated_postgres) as made:
        yield made


def run(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Run the statements and return the rows of the last."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def test_the_next_database_has_no_rows_and_counts_from_one(databases: EmptiedDatabases) -> None:
    with databases.one() as url, databases.one() as other:
        assert url != other
        first = run(url, MAKE)
    with databases.one() as again, databases.one() as beside:
        assert {again, beside} == {url, other}
        for each in (again, beside):
            assert run(each, "SELECT count(*) FROM operator_keys") == [(0,)]
            assert run(each, MAKE) == first


@pytest.mark.parametrize(
    "change",
    ["DROP INDEX ix_sessions_listed", "ANALYZE operator_keys", "UPDATE alembic_version SET version_num = '9999'"],
)
def test_a_database_that_is_no_longer_as_it_was_made_is_given_to_nobody(
    databases: EmptiedDatabases, change: str
) -> None:
    with databases.one() as url:
        run(url, MAKE, change)
    with databases.one() as next_one, databases.one() as beside:
        assert url not in (next_one, beside)
