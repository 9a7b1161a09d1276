"""Pages of rows for operators: of any table, by its primary key."""

from typing import Any, TypeVar, cast

from sqlalchemy import ColumnElement, Table, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Base

Row = TypeVar("Row", bound=Base)


async def page_of(
    session: AsyncSession, table: type[Row], *conditions: ColumnElement[bool], after: Any, most: int
) -> list[Row]:
    """Return the first ``most`` rows under the conditions whose key comes after ``after``, in order of the key.

    The table's key is one column. ``after`` None begins with the first row.
    """
    (key,) = cast(Table, table.__table__).primary_key.columns
    query = select(table).where(*conditions).order_by(key).limit(most)
    if after is not None:
        query = query.where(key > after)
    return list(await session.scalars(query))
