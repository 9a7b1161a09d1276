"""Conditions on the operations table that match the partial indexes over pending operations.

Each condition is a literal, as in the index. A bound value would keep SQLite, and PostgreSQL's generic plans, from using
the index.
"""

from typing import cast

from sqlalchemy import Table, literal_column

from store.tables import Operation

_operations = cast(Table, Operation.__table__)

IS_PENDING = _operations.c.state == literal_column("'pending'")
IS_SAMPLE = _operations.c.kind == literal_column("'sample'")
IS_TRAINING = _operations.c.kind != literal_column("'sample'")
