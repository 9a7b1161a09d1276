"""Room in memory for adapters that come in: who leaves for them, and who waits for whom."""

from functools import partial
from time import monotonic

from contracts.ids import RunId
from workers.training.lanes import Lane, Lanes
from workers.training.residency import AdapterResidency

_PROMISED_SECONDS = 10.0
"""Time for which adapters that are needed later leave room to one that waits for it. They do not after that, for as long."""


class AdapterRoom:
    """Pages adapters out for those that operations need, in the order of the operations. Called from the event loop."""

    def __init__(self, lanes: Lanes, residency: AdapterResidency) -> None:
        self._lanes = lanes
        self._residency = residency
        self._lacking = 0
        """Bytes of adapters that wait in this round for others to leave."""
        self._being_freed = 0
        """Bytes of adapters that wait in this round for others to be on disk, and for nothing else."""

    def begin_round(self) -> None:
        """Begin to ask for room, the oldest operation first."""
        self._lacking = self._being_freed = 0

    def make(self, lane: Lane, position: int) -> bool:
        """Page out adapters until there is room for the lane's. Return whether there is room now, which is kept for it.

        ``position`` is the ledger position of the operation that needs the adapter.

        - Idle adapters go first, least recently used first. Adapters whose next operation was accepted after ``position``
          go next. So the oldest operation always gets its adapter, and no tenant starves.
        - No more adapters go than must, and none where the room would be too small without all that may go, now or soon.
        - The arriving adapter waits while paged-out adapters are being written.
        - An adapter runs at least one operation before it can be evicted (prevents thrashing).
        - Adapters that are needed later wait behind one that lacks room: small ones would take each bit that becomes free.
        """
        nbytes = self._residency.nbytes_of(lane.lora)
        # One that is being written still has its memory, and may come back to it.
        promised = self._lacking if self._residency.is_leaving(lane.run) else self._lacking + self._being_freed
        has_room = partial(self._residency.has_room, lane.run, nbytes)
        now, soon = self._may_leave(position)
        if not has_room(promised=promised - self._residency.nbytes_of_runs([*now, *soon]), once_left=True):
            # Who left would be back for its next operation, and the room would still be too small.
            self._lacking += self._promised(lane, nbytes)
            return False
        while not has_room(promised=promised, once_left=True):
            if not now:
                self._lacking += self._promised(lane, nbytes)
                return False
            self._residency.page_out(now.pop(0))
        if not has_room(promised=promised):
            self._being_freed += self._promised(lane, nbytes)
            return False
        lane.lacks_room_since = None
        self._residency.expect(lane.run, nbytes)
        return True

    def _may_leave(self, position: int) -> tuple[list[RunId], list[RunId]]:
        """Return the runs whose adapters may leave now for an operation at ``position``, in their order, and those that may soon.

        Soon are those at work whose next operation was accepted later.
        """
        idle: list[RunId] = []
        younger: list[RunId] = []
        soon: list[RunId] = []
        for run in self._residency.residents():
            lane = self._lanes.get(run)
            if lane is None or not (lane.is_busy or lane.started or lane.has_work):
                idle.append(run)
            elif lane.head is not None and lane.head.position <= position:
                continue
            elif lane.is_busy or lane.started or (lane.has_just_arrived and not lane.is_held):
                soon.append(run)
            else:
                younger.append(run)
        by_use = self._residency.by_last_use
        return [*by_use(idle), *by_use(younger)], soon

    def _promised(self, lane: Lane, nbytes: int) -> int:
        """Return the bytes that adapters which are needed later leave to the lane's: all, and none where it waits for long.

        What stands in its way may stay there, and must not hold up everybody.
        """
        now = monotonic()
        if lane.lacks_room_since is None or now >= lane.lacks_room_since + 2 * _PROMISED_SECONDS:
            lane.lacks_room_since = now
        return nbytes if now < lane.lacks_room_since + _PROMISED_SECONDS else 0
