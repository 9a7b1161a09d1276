"""Report of a trainer to operators, in its row: the adapters in its memory and its last pass, written when they have changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from contracts.ids import RunId
from contracts.pass_report import EndedPass
from ledger.runtime import Runtime
from workers.leases.processes import WorkerIdentity, tell_trainer

TELL_SECONDS = 2.0
"""Least time between two writes."""
PASS_SECONDS = 5.0
"""Least time between two writes of which only the last pass is new: a trainer at work has one at every look."""
MOST_TOLD = 1000


@dataclass(frozen=True, slots=True)
class _Told:
    """Contents of a write. ``held_since``: beginning of the lease, since a new lease may begin with a new row."""

    held_since: float
    runs: list[RunId]
    last_pass: EndedPass | None


class TrainerReport:
    """Tells operators which runs are in the trainer's memory, and what its last pass was."""

    def __init__(
        self,
        runtime: Runtime,
        identity: WorkerIdentity,
        *,
        residents: Callable[[], Sequence[RunId]],
        last_pass: Callable[[], EndedPass | None],
        held_since: Callable[[], float],
    ) -> None:
        self._database = runtime.database
        self._clock = runtime.clock
        self._identity = identity
        self._residents = residents
        self._last_pass = last_pass
        self._held_since = held_since
        self._told: _Told | None = None
        self._told_at = float("-inf")

    async def tell(self) -> None:
        """Write what differs from what was written last, if it is due. Raises ``Unavailable``."""
        now = monotonic()
        new = _Told(self._held_since(), sorted(self._residents())[:MOST_TOLD], self._last_pass())
        if not self._is_due(new, now):
            return
        async with self._database.write() as transaction:
            has_row = await tell_trainer(transaction, self._identity, new.runs, new.last_pass, self._clock)
        # Without a row the process has no lease yet, or no more.
        if has_row:
            self._told, self._told_at = new, now

    def _is_due(self, new: _Told, now: float) -> bool:
        told = self._told
        if told is None or (told.held_since, told.runs) != (new.held_since, new.runs):
            return True
        return told.last_pass != new.last_pass and now - self._told_at >= PASS_SECONDS
