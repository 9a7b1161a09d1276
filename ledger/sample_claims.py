"""Return of claimed samples: once a sampling process has ended, another can claim its pending samples."""

from collections.abc import Sequence

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from store.pending_operations import IS_PENDING, IS_SAMPLE
from store.tables import Operation


async def return_samples_of(transaction: AsyncSession, processes: Sequence[str]) -> None:
    """Return every pending sample that one of ``processes`` has claimed, so that another process can claim it."""
    await transaction.execute(
        update(Operation)
        .where(IS_PENDING, IS_SAMPLE, Operation.taken_by.in_(processes))
        .values(taken_by=None)
        .execution_options(synchronize_session=False)
    )
