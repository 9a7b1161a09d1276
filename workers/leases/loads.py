"""Counts of the living trainers and their training runs, from which a trainer computes its even part of the runs."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from store.clock import Clock
from store.tables import ProcessKind
from tenants.run_leases import count_runs
from workers.leases.processes import WorkerIdentity, alive


@dataclass(frozen=True, slots=True)
class TrainerLoads:
    """Runs of the living trainers of one base model that take runs. One that is drained or ends counts only for itself."""

    #: Runs of the trainer that asks.
    own: int
    #: Runs of all living trainers.
    total: int
    #: Living trainers, the one that asks among them.
    trainers: int

    def room(self, waiting: int) -> int:
        """Return how many of the ``waiting`` runs the trainer should claim to have an even part; below zero when it has more."""
        return -(-(self.total + waiting) // self.trainers) - self.own


async def read_loads(
    session: AsyncSession, identity: WorkerIdentity, clock: Clock, *, asked_since: datetime | None = None
) -> TrainerLoads:
    """Return the loads as the trainer ``identity`` sees them, with ``asked_since`` of the runs with a request since then."""
    living = await alive(session, ProcessKind.TRAINER, identity.base_model, clock, takes_work=True)
    trainers = sorted({*living, identity.id})
    counts = await count_runs(session, trainers, asked_since=asked_since)
    return TrainerLoads(counts.get(identity.id, 0), sum(counts.values()), len(trainers))
