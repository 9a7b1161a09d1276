"""A trainer's claims: leases waiting training runs to the trainer until it has an even part of its base model's runs at work.

Runs that nobody asks for count for nothing here: a trainer that keeps many of them has time for others.
"""

import logging
from datetime import timedelta
from functools import partial

from ledger.runtime import Runtime
from ledger.wakeups import trainer_topic
from store.database import after_commit
from tenants.placements import MOST_RUNS, count_placements
from tenants.run_leases import ClaimedRuns, claim_runs
from workers.leases.loads import read_loads
from workers.leases.processes import WorkerIdentity

log = logging.getLogger(__name__)

_AT_WORK = timedelta(minutes=10)
"""Time since its last request for which a run counts as at work. Reinforcement learning samples for minutes between steps."""


class RunClaims:
    """Claims runs for one trainer."""

    def __init__(self, identity: WorkerIdentity, runtime: Runtime) -> None:
        self._identity = identity
        self._runtime = runtime

    async def claim(self) -> ClaimedRuns:
        """Claim the longest waiting runs, up to an even part of those at work, and return them. Raises ``Unavailable``."""
        base_model = self._identity.base_model
        async with self._runtime.database.read() as session:
            waiting = await count_placements(session, base_model)
            if not waiting:
                return ClaimedRuns()
            clock = self._runtime.clock
            loads = await read_loads(session, self._identity, clock, asked_since=clock() - _AT_WORK)
        room = min(loads.room(waiting), MOST_RUNS)
        return await self._claim_up_to(room) if room > 0 else ClaimedRuns()

    async def _claim_up_to(self, most: int) -> ClaimedRuns:
        async with self._runtime.database.write() as transaction:
            found = await claim_runs(
                transaction, self._identity.id, self._identity.base_model, most, self._runtime.clock()
            )
            # The API placed a run that had a trainer already. That trainer has not been woken for the operation.
            for holder in found.holders:
                self._runtime.wakeups.announce_after_commit(transaction, trainer_topic(holder))
            for _ in found.claimed:
                after_commit(transaction, partial(self._runtime.telemetry.metrics.lease_moved, "claimed"))
        if found.claimed:
            log.info("trainer %s has %d more runs", self._identity.id, len(found.claimed))
        return found
