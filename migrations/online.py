"""Changes of large tables that old and new processes go on using meanwhile. A revision that fails here is run again whole.

On PostgreSQL each change is committed by itself: an index is built beside the writers only outside of a transaction. The revision
counts as applied only at its end, so each function here does nothing where its work is done already. Give other steps of
such a revision ``if_not_exists``.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

LOCK_TIMEOUT = "5s"
"""Longest wait for a lock: every statement on the table queues behind a migration that waits."""

LARGE_TABLES = frozenset(
    {
        "adapter_gates",
        "audit_entries",
        "checkpoints",
        "operation_payloads",
        "operation_results",
        "operations",
        "run_metrics",
        "run_points",
        "runs",
        "sample_records",
        "sample_reports",
        "samplers",
        "sessions",
        "storage_hours",
        "usage_hours",
    }
)
"""Tables that grow with the service's use. Only the functions here change them; ``tests/migrations`` looks."""

_IS_BROKEN = sa.text(
    "SELECT true FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid "
    "WHERE c.relname = :name AND c.relnamespace = to_regnamespace(current_schema())::oid AND NOT i.indisvalid"
)


def build_index(name: str, table: str, columns: Sequence[str], *, where: str | None = None) -> None:
    """Build an index over the rows that match ``where``, without holding up writers on PostgreSQL."""
    condition: Any = None if where is None else sa.text(where)
    conditions = {"sqlite_where": condition, "postgresql_where": condition} if where is not None else {}
    if not _is_postgresql():
        op.create_index(name, table, list(columns), if_not_exists=True, **conditions)
        return
    with op.get_context().autocommit_block():
        # The build waits for transactions that began before it, and nobody waits for the build.
        op.execute("SET lock_timeout = 0")
        try:
            if op.get_bind().scalar(_IS_BROKEN, {"name": name}):
                # An earlier build was cut off. Its remains are kept up to date and never used.
                op.drop_index(name, table, postgresql_concurrently=True, if_exists=True)
            op.create_index(name, table, list(columns), if_not_exists=True, postgresql_concurrently=True, **conditions)
        finally:
            op.execute(f"SET lock_timeout = '{LOCK_TIMEOUT}'")


def drop_index(name: str, table: str) -> None:
    """Drop an index if it is there, without holding up writers on PostgreSQL."""
    if not _is_postgresql():
        op.drop_index(name, table, if_exists=True)
        return
    with op.get_context().autocommit_block():
        op.drop_index(name, table, if_exists=True, postgresql_concurrently=True)


def add_column(table: str, column: sa.Column[Any]) -> None:
    """Add a column, nullable or with a constant default, which rewrites no table, unless it is there.

    On PostgreSQL in a transaction of its own: a revision that locks two tables and a writer that uses both, the other way
    round, would wait for each other.
    """
    present = {found["name"] for found in sa.inspect(op.get_bind()).get_columns(table)}
    if column.name in present:
        return
    if not _is_postgresql():
        op.add_column(table, column)
        return
    with op.get_context().autocommit_block():
        op.add_column(table, column)


def add_reference(table: str, column: str, target: str) -> None:
    """Add a nullable column of 64 characters that names a row of ``target`` by its ``id``, unless it is there.

    PostgreSQL checks new rows at once, and the old ones, which all have null, without holding up writers.
    """
    present = {found["name"] for found in sa.inspect(op.get_bind()).get_columns(table)}
    name = f"fk_{table}_{column}_{target}"
    if not _is_postgresql():
        if column not in present:
            # Alembic would add the constraint afterwards, which SQLite cannot.
            op.execute(
                f"ALTER TABLE {table} ADD COLUMN {column} VARCHAR(64) CONSTRAINT {name} REFERENCES {target} (id)"
            )
        return
    add_column(table, sa.Column(column, sa.String(64), nullable=True))
    known = {found["name"] for found in sa.inspect(op.get_bind()).get_foreign_keys(table)}
    with op.get_context().autocommit_block():
        if name not in known:
            op.execute(
                f"ALTER TABLE {table} ADD CONSTRAINT {name} FOREIGN KEY ({column}) REFERENCES {target} (id) NOT VALID"
            )
        op.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"
