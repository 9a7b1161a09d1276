"""INSERT statements whose conflict clause SQLite and PostgreSQL spell differently."""

from functools import cache
from typing import cast

from sqlalchemy import Table
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.postgresql import insert as postgres_insert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase


def insert_unless_present(transaction: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """Return an insert that does nothing, and returns no row, when a unique key exists. The insert needs no savepoint."""
    return _insert_unless_present(transaction.get_bind().dialect.name, table)


def dialect_insert(session: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """Return an insert without a conflict clause, to which the caller adds one."""
    return sqlite_insert(table) if session.get_bind().dialect.name == "sqlite" else postgres_insert(table)


def replacing_insert(transaction: AsyncSession, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    """Return an insert that overwrites every column of a row with the same primary key."""
    return _replacing_insert(transaction.get_bind().dialect.name, table)


# Both cached, since building the statement takes longer than executing it.
@cache
def _insert_unless_present(dialect: str, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    plain = cast(Table, table.__table__)
    statement = sqlite_insert(plain) if dialect == "sqlite" else postgres_insert(plain)
    return statement.on_conflict_do_nothing()


@cache
def _replacing_insert(dialect: str, table: type[DeclarativeBase]) -> SqliteInsert | PostgresInsert:
    # The Core table, so that SQLAlchemy makes no object of the row.
    plain = cast(Table, table.__table__)
    columns = plain.columns
    statement = sqlite_insert(plain) if dialect == "sqlite" else postgres_insert(plain)
    return statement.on_conflict_do_update(
        index_elements=[column for column in columns if column.primary_key],
        set_={column.name: statement.excluded[column.name] for column in columns if not column.primary_key},
    )
