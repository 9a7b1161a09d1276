"""What operators want of single replicas, shared by every process through the database."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.clock import Clock
from store.database import insert_unless_present
from store.tables import DirectedReplica


class ReplicaDirective(StrEnum):
    """``drain``: no new samples; what is there ends. ``sleep``: besides, it gives its accelerator's memory back."""

    DRAIN = "drain"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class StandingDirective:
    """An order until it is lifted."""

    replica: str
    order: ReplicaDirective
    reason: str | None
    since: datetime


async def direct_replica(
    transaction: AsyncSession, base_model: str, replica: str, order: ReplicaDirective, reason: str | None, clock: Clock
) -> None:
    """Give the order, in place of the one that stood."""
    await lift_directive(transaction, base_model, replica)
    await transaction.execute(
        insert_unless_present(transaction, DirectedReplica).values(
            base_model=base_model, replica=replica, wanted=order, reason=reason, since=clock()
        )
    )


async def lift_directive(transaction: AsyncSession, base_model: str, replica: str) -> None:
    """Let it work again; harmless without an order."""
    await transaction.execute(
        delete(DirectedReplica).where(DirectedReplica.base_model == base_model, DirectedReplica.replica == replica)
    )


async def standing_directives(session: AsyncSession, base_model: str) -> dict[str, StandingDirective]:
    """Every order for the base model's replicas, by the replica's name."""
    rows = await session.scalars(
        select(DirectedReplica).where(DirectedReplica.base_model == base_model).order_by(DirectedReplica.replica)
    )
    return {
        row.replica: StandingDirective(row.replica, ReplicaDirective(row.wanted), row.reason, row.since) for row in rows
    }
