"""Durable snapshots of adapters' training states, written and recorded beside the training.

Invariants: a snapshot is recorded only once the completions of the operations that it covers are written. The snapshots of
one run are written one after another. Adapter states are immutable values, so a snapshot holds a reference and copies nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter

from contracts.ids import RunId, TenantId
from contracts.ledger_records import RunLease
from engine.training.adapter_state import AdapterState, write_state
from ledger.runtime import Runtime
from store.fair_places import FairPlaces
from tenants.checkpoints import SNAPSHOTS, new_checkpoint_id
from tenants.training_snapshots import NewSnapshot, record_snapshot
from workers.training.training_engine import TrainingEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's state after operation ``seq_id``. ``nbytes`` is the memory kept for the adapter.

    ``lease`` is the lease under which the state was computed.
    """

    run: RunId
    tenant: TenantId
    lease: RunLease
    seq_id: int
    state: AdapterState
    nbytes: int


class SnapshotWriter:
    """Writes snapshots, each in a task of its own. Called from the event loop."""

    def __init__(
        self,
        runtime: Runtime,
        engine: TrainingEngine,
        files: FairPlaces,
        *,
        drain: Callable[[RunId], Awaitable[None]],
        is_valid: Callable[[Snapshot], bool],
    ) -> None:
        """Write in places of ``files``.

        ``drain`` returns once the run's completions so far are written or dropped. Afterwards ``is_valid`` tells whether
        the snapshot may be recorded.
        """
        self._database = runtime.database
        self._data_folder = runtime.data_folder
        self._base = engine.trainer.base
        self._telemetry = engine.telemetry
        self._files = files
        self._drain = drain
        self._is_valid = is_valid
        self._tasks: dict[RunId, asyncio.Task[bool]] = {}

    def is_writing(self, run: RunId) -> bool:
        """Return whether a snapshot of the run is being written."""
        return run in self._tasks

    def begin(self, snapshot: Snapshot) -> asyncio.Task[bool]:
        """Begin to write the snapshot. The task returns whether it was recorded, and does not raise."""
        before = self._tasks.get(snapshot.run)
        task = asyncio.create_task(self._write(snapshot, before), name=f"snapshot {snapshot.run}")
        self._tasks[snapshot.run] = task

        def ended(done: asyncio.Task[bool]) -> None:
            if self._tasks.get(snapshot.run) is done:
                del self._tasks[snapshot.run]

        task.add_done_callback(ended)
        return task

    async def finished(self, run: RunId | None = None) -> None:
        """Wait until no snapshot of any run is being written; with ``run``, until the run's present snapshots are written."""
        if run is not None:
            if (task := self._tasks.get(run)) is not None:
                await asyncio.wait([task])
            return
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _write(self, snapshot: Snapshot, before: asyncio.Task[bool] | None) -> bool:
        try:
            if before is not None:
                await asyncio.wait([before])
            await self._drain(snapshot.run)
            return self._is_valid(snapshot) and await self._record(snapshot)
        except Exception:
            # No operation is lost: the ledger keeps what is needed to rebuild the run from its last snapshot.
            self._telemetry.snapshot_failed()
            log.exception("snapshot failed run=%s", snapshot.run)
            return False

    async def _record(self, snapshot: Snapshot) -> bool:
        started = perf_counter()
        directory = f"{SNAPSHOTS}/{new_checkpoint_id()}"
        async with self._files.place_of(snapshot.tenant):
            path = self._data_folder.path(directory)
            size = await asyncio.to_thread(write_state, path, self._base, snapshot.state)
        new = NewSnapshot(snapshot.run, snapshot.tenant, snapshot.lease, snapshot.seq_id, directory, size)
        async with self._database.write() as transaction:
            outcome = await record_snapshot(transaction, new)
        if outcome.is_recorded:
            self._telemetry.snapshot_written(seconds=perf_counter() - started)
        if outcome.obsolete is not None:
            await self._database.flush()
            await asyncio.to_thread(self._data_folder.remove, outcome.obsolete)
        return outcome.is_recorded
