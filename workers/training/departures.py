"""Carries out operators' directives in a trainer's memory: runs that leave it, adapters that go to disk, tenants that wait.

A held lane begins nothing new. What is under way ends and is recorded, the adapter is written to disk, and then the run is
handed over. So the next trainer finds a snapshot that covers everything, and replays nothing.
"""

import logging
from collections.abc import Callable

from contracts.ids import RunId
from workers.leases.directives import Directives
from workers.leases.runs import RunLeases
from workers.training.lanes import Lanes
from workers.training.residency import AdapterResidency

log = logging.getLogger(__name__)


class Departures:
    """Holds lanes, and takes their runs out of one trainer's memory. Called from the worker's loop."""

    def __init__(
        self, leases: RunLeases, lanes: Lanes, residency: AdapterResidency, *, drop: Callable[[RunId], None]
    ) -> None:
        """``drop`` forgets a run that this trainer does not have any more."""
        self._leases = leases
        self._lanes = lanes
        self._residency = residency
        self._drop = drop
        self._known = Directives()

    async def carry_out(self) -> bool:
        """Take every directive a step further. Return whether lanes may run now that were held. Raises ``Unavailable``."""
        directives = self._leases.directives
        if directives == self._known and not (directives.leaving or directives.evicted):
            return False
        is_freed = self._hold(directives)
        gone = [run for run in directives.leaving if self._is_out(run)]
        if gone:
            await self._leases.releases.hand_over({run: directives.leaving[run] for run in gone})
            for run in gone:
                self._drop(run)
        evicted = [run for run in directives.evicted if self._is_out(run)]
        if evicted:
            await self._leases.releases.note_evicted(evicted)
        if gone or evicted:
            await self._leases.look_at_directives()
            is_freed = self._hold(self._leases.directives) or is_freed
        return is_freed

    def _hold(self, directives: Directives) -> bool:
        self._known = directives
        return self._lanes.hold({*directives.leaving, *directives.evicted}, directives.suspended)

    def _is_out(self, run: RunId) -> bool:
        """Take the run's adapter out of memory as far as that can be done now, and return whether it is out."""
        lane = self._lanes.get(run)
        if lane is not None and (lane.is_busy or lane.started or lane.unwritten):
            return False
        if self._residency.holds(run):
            self._residency.page_out(run)
        return self._residency.is_away(run)
