"""Conditions on the operations table that match the partial indexes over pending operations.

Each condition is a literal, as in the index. A bound value would keep SQLite, and PostgreSQL's generic plans, from using
the index.
"""

from typing import cast

from sqlalchemy import ColumnElement, FromClause, Table, literal_column

from store.tables import Operation

_operations = cast(Table, Operation.__table__)

IS_PENDING = _operations.c.state == literal_column("'pending'")
IS_SAMPLE = _operations.c.kind == literal_column("'sample'")
IS_TRAINING = _operations.c.kind != literal_column("'sample'")
IS_HELD = _operations.c.held_by.is_not(None)


def pending_sample(table: FromClause) -> ColumnElement[bool]:
    """Return the condition of a pending sample for an alias of the table."""
    return (table.c.state == literal_column("'pending'")) & (table.c.kind == literal_column("'sample'"))
