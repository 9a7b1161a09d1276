"""Places unplaced runs: training runs that have work but neither a trainer nor a placement, the row that asks for one.

An operation that was accepted while its run's trainer died may have left no placement.
"""

from time import monotonic

from ledger.runtime import Runtime
from tenants.placements import place_runs, unplaced_runs

NET_SECONDS = 5.0
"""Seconds between two looks for unplaced runs."""


class UnplacedRuns:
    """Places the unplaced runs of one base model, every ``NET_SECONDS``."""

    def __init__(self, base_model: str, runtime: Runtime) -> None:
        self._base_model = base_model
        self._runtime = runtime
        self._looked = float("-inf")

    async def place_if_due(self) -> None:
        """Insert the missing placements, unless the last look was within ``NET_SECONDS``. Raises ``Unavailable``."""
        if monotonic() - self._looked < NET_SECONDS:
            return
        self._looked = monotonic()
        async with self._runtime.database.read() as session:
            runs = await unplaced_runs(session, self._base_model)
        if runs:
            async with self._runtime.database.write() as transaction:
                await place_runs(transaction, runs, self._runtime.clock())
