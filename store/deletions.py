"""Deletion of rows in batches, so that no statement holds many of them locked."""

from typing import Any, cast

from sqlalchemy import ColumnElement, Table, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, InstrumentedAttribute


async def delete_some(
    transaction: AsyncSession,
    table: type[DeclarativeBase],
    which: ColumnElement[bool],
    *,
    most: int,
    first: InstrumentedAttribute[Any] | None = None,
) -> int:
    """Delete at most ``most`` rows that meet the condition, the least by ``first`` before others; return how many."""
    key = cast(Table, table.__table__).primary_key.columns.values()
    some = select(*key).where(which).limit(most)
    identity = key[0] if len(key) == 1 else tuple_(*key)
    gone = delete(table).where(identity.in_(some if first is None else some.order_by(first))).returning(key[0])
    return len((await transaction.execute(gone.execution_options(synchronize_session=False))).all())
