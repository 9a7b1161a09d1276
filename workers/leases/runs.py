"""The lease loop of a trainer: renews the trainer's lease, reaps dead trainers, and claims training runs that wait.

A trainer holds its runs while its process lives. A fencing token in the run's row refuses writes of a trainer whose lease on
the run has passed to another (``tenants/run_leases.py``).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Protocol

from contracts.ids import RunId
from ledger.runtime import Runtime
from ledger.wakeups import placements_topic
from store.repeat import repeat
from telemetry.readiness import NotReady
from tenants.run_leases import ClaimedRuns
from workers.leases.base_weights import WeightsCheck
from workers.leases.claims import RunClaims
from workers.leases.directives import Directives, read_directives
from workers.leases.heartbeat import Heartbeat
from workers.leases.processes import WorkerIdentity
from workers.leases.reaper import reap_peers
from workers.leases.releases import RunReleases
from workers.leases.unplaced import NET_SECONDS, UnplacedRuns

log = logging.getLogger(__name__)

_LOOK_REST = 3.0
"""Rest after a look, in times as long as the look. Each new run announces its placement, and one look claims them all."""


class OnNews(Protocol):
    """Callee of the lease loop."""

    def __call__(self, claimed: Collection[RunId], /, *, is_directed: bool) -> None:
        """Hear of runs that were claimed, and whether operators' directives have changed."""


class RunLeases:
    """One trainer's leases on the runs of its base model."""

    def __init__(
        self,
        identity: WorkerIdentity,
        runtime: Runtime,
        *,
        may_renew: Callable[[], bool] = lambda: True,
        weights: WeightsCheck | None = None,
    ) -> None:
        """Renew only while ``may_renew``: a trainer whose pass makes no progress must not keep its runs.

        A trainer whose ``weights`` are not accepted gets no runs, and loses those that it has with its lease.
        """
        self._may_renew = may_renew
        self.weights = weights
        self.identity = identity
        self.releases = RunReleases(identity, runtime)
        self._runtime = runtime
        self._heartbeat = Heartbeat(identity, runtime)
        self._unplaced = UnplacedRuns(identity.base_model, runtime)
        self._claims = RunClaims(identity, runtime)
        self._on_news: OnNews | None = None
        self._on_row: Callable[[], Awaitable[None]] | None = None
        self._row: datetime | None = None
        """Row of which ``_on_row`` has heard."""
        self.directives = Directives()
        """Operators' directives as of the last look."""
        self._stopping = asyncio.Event()
        self._placed = asyncio.Event()

    def on_claims(self, on_news: OnNews) -> None:
        """Call ``on_news`` with runs that were claimed, which may have operations from before, and when directives change."""
        self._on_news = on_news

    def on_row(self, on_row: Callable[[], Awaitable[None]]) -> None:
        """Await ``on_row`` whenever this trainer has another row than before, and before it claims runs with that one."""
        self._on_row = on_row

    async def run(self) -> None:
        """Renew, reap and claim until ``stop``."""
        with self._runtime.wakeups.listen(placements_topic(self.identity.base_model)) as self._placed:
            await repeat(
                self.look,
                seconds=NET_SECONDS if self._heartbeat.is_alone else self._heartbeat.renewal_seconds,
                stopping=self._stopping,
                wake=self._placed,
                rest=_LOOK_REST,
                failed=f"leases of {self.identity.id} could not be looked after",
            )

    def stop_claiming(self) -> None:
        """Claim no further run, and have the others know: this trainer is about to end."""
        self._heartbeat.end()
        self._placed.set()

    def stop(self) -> None:
        """End ``run``. The trainer keeps its runs until they are released, or until its lease ends."""
        self._stopping.set()

    async def look(self) -> None:
        """Renew and reap if the heartbeat is due, read directives, place unplaced runs, and claim. Raises ``Unavailable``."""
        if not self._may_renew():
            log.error("trainer %s makes no progress and does not renew its lease", self.identity.id)
            return
        if self.weights is not None and not await self.weights.are_accepted():
            return
        if self._heartbeat.is_due:
            await self._heartbeat.renew()
            await self._hear_of_row()
            await reap_peers(self._runtime, self._heartbeat)
        is_directed = await self.look_at_directives()
        await self._unplaced.place_if_due()
        found = ClaimedRuns()
        if not (self._heartbeat.is_ending or self.directives.is_drained):
            found = await self._claims.claim()
        if found.has_left:
            self._placed.set()
        if (found.claimed or is_directed) and self._on_news is not None:
            self._on_news(found.claimed, is_directed=is_directed)

    async def _hear_of_row(self) -> None:
        if self._on_row is not None and self._heartbeat.row_since != self._row:
            await self._on_row()
            self._row = self._heartbeat.row_since

    async def look_at_directives(self) -> bool:
        """Read operators' directives for this trainer; return whether they have changed. Raises ``Unavailable``."""
        async with self._runtime.database.read() as session:
            found = await read_directives(session, self.identity.id)
        has_changed = found != self.directives
        self.directives = found
        return has_changed

    @property
    def held_since(self) -> float:
        """Monotonic time since which the trainer's lease has not lapsed."""
        return self._heartbeat.held_since

    @property
    def may_declare_dead(self) -> bool:
        """True when this trainer may declare dead a process whose lease has ended (``Heartbeat.may_declare_dead``)."""
        return self._heartbeat.may_declare_dead

    async def check(self) -> None:
        """Raise ``NotReady`` when the weights are not accepted, or the lease has ended."""
        if self.weights is not None:
            self.weights.check()
        if not self._heartbeat.has_lease:
            raise NotReady("this trainer cannot renew its lease")
