"""What operators want of single replicas, shared by every process through the database."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.clock import Clock
from store.database import insert_unless_present
from store.tables import OrderedReplica


class ReplicaOrder(StrEnum):
    """``drain``: no new samples; what is there ends. ``sleep``: besides, it gives its accelerator's memory back."""

    DRAIN = "drain"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class StandingOrder:
    """An order until it is lifted."""

    replica: str
    order: ReplicaOrder
    reason: str | None
    since: datetime


async def order_replica(
    transaction: AsyncSession, base_model: str, replica: str, order: ReplicaOrder, reason: str | None, clock: Clock
) -> None:
    """Give the order, in place of the one that stood."""
    await lift_order(transaction, base_model, replica)
    await transaction.execute(
        insert_unless_present(transaction, OrderedReplica).values(
            base_model=base_model, replica=replica, wanted=order, reason=reason, since=clock()
        )
    )


async def lift_order(transaction: AsyncSession, base_model: str, replica: str) -> None:
    """Let it work again; harmless without an order."""
    await transaction.execute(
        delete(OrderedReplica).where(OrderedReplica.base_model == base_model, OrderedReplica.replica == replica)
    )


async def standing_orders(session: AsyncSession, base_model: str) -> dict[str, StandingOrder]:
    """Every order for the base model's replicas, by the replica's name."""
    rows = await session.scalars(
        select(OrderedReplica).where(OrderedReplica.base_model == base_model).order_by(OrderedReplica.replica)
    )
    return {row.replica: StandingOrder(row.replica, ReplicaOrder(row.wanted), row.reason, row.since) for row in rows}
