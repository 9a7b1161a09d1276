"""The dead of whom nobody of their kind is left: whoever keeps house reaps them.

Usually a living process of the same kind and base model does, at once. Where there is none, what the dead had taken would
be theirs for ever.
"""

from collections.abc import Callable
from datetime import timedelta

from ledger.wakeups import Wakeups
from store.clock import Clock
from store.database import Database
from workers.leases.pools import reap_pools
from workers.leases.processes import ProcessKind, database_now, hold_expired
from workers.leases.runs import reap_trainers

_LEASES = 10
"""How long after its end a lease is nobody's any more: everybody who lives has renewed in this time."""


async def reap_forsaken(
    database: Database,
    wakeups: Wakeups,
    clock: Clock,
    *,
    lease: timedelta,
    may_judge: Callable[[], bool],
    moved: Callable[[str], None],
) -> None:
    """Free what those had whose lease has ended long ago. Raises ``Unavailable``.

    ``may_judge``: whether this process was in touch with the database all the while; else those who seem dead may have
    been cut off together with it. ``moved`` counts the moves of runs by reason.
    """
    async with database.write() as transaction:
        now = await database_now(transaction, clock)
        # Asked after the time was read: a database that stands still between the two makes nobody look dead.
        if not may_judge():
            return
        dead = await hold_expired(transaction, now - _LEASES * lease)
        trainers = [one.id for one in dead if one.kind is ProcessKind.TRAINER]
        await reap_trainers(transaction, trainers, clock(), moved)
        for base_model in sorted({one.base_model for one in dead}):
            pools = [one.id for one in dead if (one.kind, one.base_model) == (ProcessKind.POOL, base_model)]
            await reap_pools(transaction, pools, base_model, wakeups)
