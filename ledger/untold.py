"""Untold ends: operations whose results are written, and whose writer died or lost its connection before it told so."""

from collections.abc import Collection
from datetime import timedelta
from functools import partial

from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncSession

from ledger.statements import operations, runs
from ledger.wakeups import Wakeups, operation_topic
from store.clock import Clock
from store.database import after_commit

_RECENT = timedelta(minutes=1)
"""Age of an end that every client has heard of: all listeners look by themselves sooner."""
_MOST_OF_A_RUN = 16
_JUST_ENDED = select(operations.c.id).join_from(
    runs,
    operations,
    (operations.c.lane == runs.c.id)
    & (operations.c.seq_id >= runs.c.next_seq_id - _MOST_OF_A_RUN)
    & (operations.c.seq_id < runs.c.next_seq_id),
)
_JUST_ENDED = _JUST_ENDED.where(
    runs.c.trainer_id == bindparam("trainer"), operations.c.finished_at > bindparam("ended_after")
)


def wake_pollers(wakeups: Wakeups, requests: Collection[str]) -> None:
    """Have the clients of ``requests`` look: the operations may have ended."""
    for request in requests:
        wakeups.announce(operation_topic(request))


async def tell_of_trainer(transaction: AsyncSession, trainer: str, wakeups: Wakeups, clock: Clock) -> None:
    """Have the clients of the trainer's runs look, after the commit: for the last operations that have ended in each."""
    found = await transaction.execute(_JUST_ENDED, {"trainer": trainer, "ended_after": clock() - _RECENT})
    after_commit(transaction, partial(wake_pollers, wakeups, list(found.scalars())))
