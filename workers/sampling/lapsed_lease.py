"""A lapse of a sampling process's lease: others may draw its samples, so it cuts them, and returns them once the lease is back.

After a lapse the samples are saved with the tokens drawn so far, as far as nobody has claimed them meanwhile. This process
claims none before that.
"""

import asyncio
import logging
from collections.abc import Mapping

from ledger.runtime import Runtime
from ledger.wakeups import cleared_samples_topic
from tenants.gates import clear_in_flight
from workers.leases.pools import PoolHeartbeat
from workers.sampling.resumption import Resumption, Unfinished

log = logging.getLogger(__name__)


class LapsedLease:
    """Samples of one base model that a lapse of the lease has cut."""

    def __init__(self, runtime: Runtime, base_model: str, heartbeat: PoolHeartbeat, resumption: Resumption) -> None:
        self._runtime = runtime
        self._base_model = base_model
        self._heartbeat = heartbeat
        self._resumption = resumption
        self.is_off = False
        """True from the beginning of a lapse until what it has cut is returned. The process draws and claims nothing then."""
        self.cut: set[str] = set()
        """Samples that are being cut."""
        self.unsaved: list[Unfinished] = []
        """Samples that were cut, with their tokens. They stay claimed until these are saved."""

    async def mind(self, drawn: Mapping[str, asyncio.Task[object]]) -> bool:
        """Cut what is ``drawn`` during a lapse; return what it has cut once it is over, and then True. Raises ``Unavailable``."""
        if not self._heartbeat.may_draw:
            self._cut(drawn)
            return False
        # A sample that took long to cut is returned after the others.
        if not (self.is_off or self.unsaved):
            return False
        await self._return_samples()
        self.is_off = False
        return True

    def _cut(self, drawn: Mapping[str, asyncio.Task[object]]) -> None:
        if not self.is_off:
            log.warning(
                "base=%s: the lease was not renewed in time; %d samples are cut, and go on once it is",
                self._base_model,
                len(drawn),
            )
        self.is_off = True
        for operation in drawn.keys() - self.cut:
            self.cut.add(operation)
            drawn[operation].cancel()

    async def _return_samples(self) -> None:
        unsaved = list(self.unsaved)
        # Those that have been claimed anew meanwhile belong to that claim, this process's own too.
        process = self._heartbeat.identity.id
        await self._resumption.save(unsaved, process=process)
        claim_of = {operation.id: operation.claim for operation, _, _ in unsaved}
        async with self._runtime.database.write() as transaction:
            mine = await self._runtime.ledger.claimed(transaction, list(claim_of), process=process)
            cleared = [one for one, claim in claim_of.items() if mine.get(one, claim) == claim]
            await clear_in_flight(transaction, cleared, process)
            self._runtime.ledger.wakeups.announce_after_commit(transaction, cleared_samples_topic(self._base_model))
        del self.unsaved[: len(unsaved)]
