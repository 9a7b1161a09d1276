"""Replica directives: rows by which an operator tells one replica to drain or to sleep. Every process reads the rows."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.stored_words import known
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import DirectedReplica


class ReplicaDirective(StrEnum):
    """State that an operator wants of a replica.

    - ``drain``: the replica gets no new samples and finishes its running ones.
    - ``sleep``: the replica drains, then frees its accelerator's memory.
    """

    DRAIN = "drain"
    SLEEP = "sleep"


@dataclass(frozen=True, slots=True)
class StandingDirective:
    """A directive that holds until it is lifted."""

    replica: str
    directive: ReplicaDirective
    reason: str | None
    since: datetime


async def direct_replica(
    transaction: AsyncSession,
    base_model: str,
    replica: str,
    directive: ReplicaDirective,
    reason: str | None,
    clock: Clock,
) -> None:
    """Set the replica's directive, replacing an earlier one."""
    await lift_directive(transaction, base_model, replica)
    await transaction.execute(
        insert_unless_present(transaction, DirectedReplica).values(
            base_model=base_model, replica=replica, wanted=directive, reason=reason, since=clock()
        )
    )


async def lift_directive(transaction: AsyncSession, base_model: str, replica: str) -> None:
    """Delete the replica's directive, if there is one: the replica works again."""
    await transaction.execute(
        delete(DirectedReplica).where(DirectedReplica.base_model == base_model, DirectedReplica.replica == replica)
    )


async def standing_directives(session: AsyncSession, base_model: str) -> dict[str, StandingDirective]:
    """Return every directive for the base model's replicas, by the replica's name."""
    rows = await session.scalars(
        select(DirectedReplica).where(DirectedReplica.base_model == base_model).order_by(DirectedReplica.replica)
    )
    return {row.replica: standing_directive_of(row) for row in rows}


def standing_directive_of(row: DirectedReplica) -> StandingDirective:
    """Return the directive in a row."""
    return StandingDirective(row.replica, _wanted(row), row.reason, row.since)


def _wanted(row: DirectedReplica) -> ReplicaDirective:
    """Return the directive. One that only another version knows still keeps new samples away."""
    return known(ReplicaDirective, row.wanted, ReplicaDirective.DRAIN)
