"""The service's row: whether clients could reach it lately, so that nobody is ended for its own silence, and its data folder."""

from datetime import datetime, timedelta

from sqlalchemy import case, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.database_clock import database_now
from store.inserts import dialect_insert
from store.tables import ServicePresence
from tenants.clock_steps import SMALLEST, mend_times_ahead

_THE_ROW = 1
_NOTES = 12
"""Notes in the time after which a silent session ends."""
_SHORTEST, _LONGEST = timedelta(milliseconds=250), timedelta(seconds=30)
_MISSED = 3
"""Notes that are missed before the service counts as silent."""


def note_interval(session_timeout: timedelta) -> timedelta:
    """Return the time between two notes of a process that answers clients."""
    return min(max(session_timeout / _NOTES, _SHORTEST), _LONGEST)


async def note_presence(session: AsyncSession, *, now: datetime, session_timeout: timedelta) -> None:
    """Record that clients can reach this process now. After a few missed notes, the service is back from a silence.

    A last note that lies ahead is that of a clock which was set back: what it has left ahead is mended. Or this process was
    frozen, and ``now`` is old: the database's own time tells, which nobody notes meanwhile.
    """
    ahead = select(ServicePresence.present_at).where(ServicePresence.present_at > now + SMALLEST).with_for_update()
    was_at = await session.scalar(ahead)
    if was_at is not None:
        told = now
        now = await database_now(session, lambda: told)
        if was_at > now + SMALLEST:
            await mend_times_ahead(session, was_at=was_at, now=now)
    insert = dialect_insert(session, ServicePresence).values(number=_THE_ROW, present_at=now, back_at=now)
    is_back = or_(
        ServicePresence.present_at < now - _MISSED * note_interval(session_timeout), ServicePresence.back_at > now
    )
    await session.execute(
        insert.on_conflict_do_update(
            index_elements=[ServicePresence.number],
            set_={"present_at": now, "back_at": case((is_back, now), else_=ServicePresence.back_at)},
        )
    )


async def was_present(
    session: AsyncSession, *, now: datetime, session_timeout: timedelta, through: timedelta | None = None
) -> bool:
    """Return whether clients could reach the service all through the last ``through``, by default ``session_timeout``."""
    found = await session.get(ServicePresence, _THE_ROW, populate_existing=True)
    if found is None:
        return False
    is_present = found.present_at >= now - _MISSED * note_interval(session_timeout)
    return is_present and found.back_at <= now - (through or session_timeout)


async def marked_data_folder(session: AsyncSession) -> str | None:
    """Return the mark of the data folder that rows name files of; None before the first start."""
    return await session.scalar(select(ServicePresence.data_folder))


async def mark_data_folder(transaction: AsyncSession, mark: str, now: datetime) -> str:
    """Note the data folder's mark, unless another process was faster. Return the mark that is noted."""
    row = dialect_insert(transaction, ServicePresence).values(number=_THE_ROW, present_at=now, back_at=now)
    await transaction.execute(row.on_conflict_do_nothing())
    unmarked = update(ServicePresence).where(ServicePresence.data_folder.is_(None)).values(data_folder=mark)
    await transaction.execute(unmarked.execution_options(synchronize_session=False))
    return await marked_data_folder(transaction) or mark
