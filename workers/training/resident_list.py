"""List of the adapters in a trainer's memory, told in its row for operators: written when it has changed."""

from collections.abc import Callable, Sequence

from contracts.ids import RunId
from store.database import Database
from workers.leases.processes import WorkerIdentity, tell_residents

TELL_SECONDS = 2.0
"""Least time between two writes."""
MOST_TOLD = 1000


class ResidentList:
    """Tells operators which runs are in the trainer's memory."""

    def __init__(self, database: Database, identity: WorkerIdentity, residents: Callable[[], Sequence[RunId]]) -> None:
        self._database = database
        self._identity = identity
        self._residents = residents
        self._told: list[RunId] = []

    async def tell(self) -> None:
        """Write the list if it differs from what was written last. Raises ``Unavailable``."""
        runs = sorted(self._residents())[:MOST_TOLD]
        if runs == self._told:
            return
        async with self._database.write() as transaction:
            has_row = await tell_residents(transaction, self._identity, runs)
        # Without a row the process has no lease yet, or no more.
        if has_row:
            self._told = runs
