"""Attempts: how often a process ended while it computed an operation, counted in the operation's row."""

from collections.abc import Collection
from typing import cast

from sqlalchemy import Table, bindparam, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Operation

_MOST_IDS = 500
"""Ids in one statement."""

_operations = cast(Table, Operation.__table__)
_COUNT = (
    update(_operations)
    .where(_operations.c.id.in_(bindparam("ids", expanding=True)))
    .values(attempts=_operations.c.attempts + 1)
)


async def count_attempts(transaction: AsyncSession, operations: Collection[str]) -> None:
    """Count one attempt more for each of ``operations``, at which a process has just ended. Unknown ids are passed over."""
    # In order, so that two transactions that count the same operations cannot deadlock.
    ids = sorted(operations)
    for first in range(0, len(ids), _MOST_IDS):
        await transaction.execute(_COUNT, {"ids": ids[first : first + _MOST_IDS]})
