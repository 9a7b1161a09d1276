"""PostgreSQL databases of one schema that tests use one after the other, emptied in between.

To empty one takes a small part of the time of a copy, which waits for a disk that flushes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from testing.throwaway_database import throwaway_database

_MOST_GROWTH_BYTES = 8 * 2**20
_OTHERS_END_MS = 30_000
_END_OTHERS = (
    "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
_TABLES = (
    "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'alembic_version' ORDER BY tablename"
)
_RESTART = "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false) FROM pg_sequences"
_SCHEMA = """
SELECT md5(string_agg(line, E'\n' ORDER BY line)) FROM (
    SELECT indexdef AS line FROM pg_indexes WHERE schemaname = 'public'
    UNION ALL
    SELECT concat_ws(' ', c.relname, a.attname, a.atttypid::regtype, a.attnotnull, pg_get_expr(d.adbin, d.adrelid))
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND a.attnum > 0
    UNION ALL
    SELECT concat_ws(' ', conrelid::regclass, pg_get_constraintdef(oid)) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace
    UNION ALL
    SELECT concat_ws(' ', pg_get_triggerdef(oid), tgenabled) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL
    SELECT concat_ws(' ', proname, prosrc) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
    UNION ALL
    SELECT version_num FROM alembic_version
    UNION ALL
    SELECT setconfig::text FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase
        WHERE d.datname = current_database()
) AS lines
"""
_ANALYZED = (
    "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND reltuples > 0 "
    "AND relname <> 'alembic_version'"
)
_SIZE = "SELECT pg_database_size(current_database())"


class EmptiedDatabases:
    """Copies of the database at the URL ``template``, to which nobody may be connected. Dropped when the block ends."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._free: list[tuple[str, ExitStack]] = []
        with _connected(template) as connection:
            self._schema, self._size = _text(connection, _SCHEMA), _number(connection, _SIZE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _name, made in self._free:
            made.close()

    @contextmanager
    def one(self) -> Iterator[str]:
        """Yield the async URL of a database without rows, as a copy of the template is."""
        if self._free:
            url, made = self._free.pop()
        else:
            made = ExitStack()
            url = made.enter_context(throwaway_database(template=self._template))
        yield url
        if self._empty(url):
            self._free.append((url, made))
        else:
            made.close()

    def _empty(self, url: str) -> bool:
        """Delete every row; return whether the database is as the template then, its statistics too."""
        with _connected(url) as connection:
            connection.execute(_END_OTHERS, (_OTHERS_END_MS,))
            growth = _number(connection, _SIZE) - self._size
            if (
                growth > _MOST_GROWTH_BYTES
                or _number(connection, _ANALYZED)
                or _text(connection, _SCHEMA) != self._schema
            ):
                return False
            # Neither foreign keys nor the audit log's triggers are in the way.
            connection.execute("SET session_replication_role = replica")
            connection.execute("SET synchronous_commit = off")
            tables = [str(name) for (name,) in connection.execute(_TABLES)]
            connection.execute(SQL("; ").join(SQL("DELETE FROM {}").format(Identifier(name)) for name in tables))
            connection.execute(_RESTART)
        return True


def _connected(url: str) -> psycopg.Connection[tuple[object, ...]]:
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True, connect_timeout=60)


def _text(connection: psycopg.Connection[tuple[object, ...]], query: str) -> str:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return str(row[0])


def _number(connection: psycopg.Connection[tuple[object, ...]], query: str) -> int:
    return int(_text(connection, query))
