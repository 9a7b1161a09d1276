"""Tracks the adapters in the trainer's memory and the room left there, brings adapters in and pages them out.

Invariants: the state that the trainer holds for a run equals the effect of every operation of the run's lane up to
``applied_seq_id``. Whenever memory and ledger may differ, the adapter is forgotten and rebuilt from the ledger.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from contracts.errors import WeftError
from contracts.ids import RunId, TenantId
from contracts.ledger_records import LanePosition, ReadyOperation, RunLease, lease_of
from contracts.operations import DEFAULT_ALPHA, LoadWeights, LoraSettings
from engine.training.adapter_state import AdapterState, largest_nbytes
from engine.training.budgets import default_adapter_memory
from ledger.runtime import Runtime
from store.fair_places import OWN_WORK, FairPlaces
from workers.training.adapter_restorer import AdapterRestorer, LoadedCheckpoint
from workers.training.lanes import Rebuild
from workers.training.snapshot_writer import Snapshot, SnapshotWriter
from workers.training.training_engine import TrainingEngine

MAX_FILES_AT_ONCE = 4
"""Adapters read or written at the same time."""
_FILES_OF_A_TENANT = MAX_FILES_AT_ONCE // 2


@dataclass(slots=True)
class _Resident:
    """A resident adapter. ``nbytes`` is the memory kept for it; ``last_used`` grows with each use of any adapter.

    ``applied_seq_id`` is the last operation in memory, ``snapshot_seq_id`` the last one that a snapshot covers.
    """

    tenant: TenantId
    lease: RunLease
    applied_seq_id: int
    snapshot_seq_id: int
    nbytes: int
    last_used: int = 0


class AdapterResidency:
    """Brings adapters into memory, snapshots them and pages them out. Called from the event loop, by one worker."""

    def __init__(
        self,
        runtime: Runtime,
        engine: TrainingEngine,
        *,
        drain: Callable[[RunId], Awaitable[None]],
        on_room: Callable[[], None],
    ) -> None:
        """Use ``drain`` to wait until a run's completions so far are written or dropped. Call ``on_room`` when room was made."""
        settings = runtime.settings
        self._snapshot_operations = settings.snapshot_operations
        self._memory_bytes = settings.adapter_memory_bytes or default_adapter_memory(engine.trainer.base)
        self._trainer = engine.trainer
        self._compute = engine.compute
        self._telemetry = engine.telemetry
        self._on_room = on_room
        self.files = FairPlaces(MAX_FILES_AT_ONCE, each=_FILES_OF_A_TENANT)
        """Places of adapters that are read or written, snapshots and checkpoints alike, which tenants take in turns."""
        self._restorer = AdapterRestorer(runtime, engine, self.files)
        self._snapshots = SnapshotWriter(runtime, engine, self.files, drain=drain, is_valid=self._is_known)
        self._residents: dict[RunId, _Resident] = {}
        self._leaving: dict[RunId, Snapshot] = {}
        self._arriving: dict[RunId, int] = {}
        """Bytes of each adapter that is being brought in."""
        self._sizes: dict[LoraSettings, int] = {}
        """Bytes by what they depend on: rank and targets."""
        self._uses = 0

    # --- coming in -------------------------------------------------------------------------------------------------

    def holds(self, run: RunId) -> bool:
        """Return whether the run's adapter is in memory and may be computed on."""
        return run in self._residents

    def is_at(self, run: RunId, seq_id: int) -> bool:
        """Return whether the adapter is in memory and ``seq_id`` is the operation that comes next to it."""
        resident = self._residents.get(run)
        return resident is not None and resident.applied_seq_id == seq_id - 1

    def agrees_with(self, run: RunId, position: LanePosition) -> bool:
        """Return whether the adapter in memory has the effect of just those operations that the ledger calls done.

        If so it stands at ``position`` from now on: operations that failed without being run have changed nothing.
        """
        resident = self._residents.get(run)
        if resident is None or not position.done_seq_id <= resident.applied_seq_id < position.next_seq_id:
            return False
        resident.applied_seq_id = position.next_seq_id - 1
        return True

    def is_away(self, run: RunId) -> bool:
        """Return whether nothing of the run is in memory or on its way to disk."""
        return not (run in self._residents or run in self._leaving or self._snapshots.is_writing(run))

    def is_leaving(self, run: RunId) -> bool:
        """Return whether the adapter is on its way to disk and still in memory."""
        return run in self._leaving

    def lease_of(self, run: RunId) -> RunLease | None:
        """Return the lease under which the run's adapter came into memory, None when it is not there."""
        there = self._residents.get(run) or self._leaving.get(run)
        return None if there is None else there.lease

    async def bring_in(self, operation: ReadyOperation) -> Rebuild | None:
        """Bring the operation's adapter into memory: as its snapshot has it, or as it was when it is on its way to disk.

        Return which operations it lacks; None: it is as it was. Raises ``WeftError`` when the adapter cannot be restored,
        and ``SnapshotUnread`` when a file of it cannot be read now.
        """
        run = RunId(operation.lane)
        leaving = self._leaving.get(run)
        if leaving is not None:
            await self._put_back(leaving)
            return None
        await self._snapshots.finished(run)
        try:
            found = await self._restorer.restore(operation)
        except WeftError:
            self.forget(run)
            raise
        lacking = found.rebuild.replays
        applied = (lacking[0].seq_id if lacking else found.rebuild.next_seq_id) - 1
        self._note(run, operation, found.state, applied=applied, snapshot=found.snapshot_seq_id)
        self._telemetry.paged_in()
        return found.rebuild

    async def create(self, operation: ReadyOperation, settings: LoraSettings) -> None:
        """Make a fresh adapter for the operation's run. Raises ``InvalidRequest``."""
        run = RunId(operation.lane)
        state = await self._restorer.put_fresh(run, settings, operation)
        self._note(run, operation, state, applied=operation.seq_id)

    async def read_checkpoint(self, operation: ReadyOperation, load: LoadWeights) -> LoadedCheckpoint:
        """Return the state that the operation's adapter is to get from a training checkpoint.

        Raises ``WeftError``, and ``CheckpointUnread`` for files that cannot be read now.
        """
        # Creations come one at a time, and everybody's wait for each.
        owner = OWN_WORK if load.creates else operation.tenant
        return await self._restorer.read_checkpoint(operation, load, owner, [operation.id])

    async def take(self, operation: ReadyOperation, load: LoadWeights, state: AdapterState) -> None:
        """Put a state that was read into the operation's adapter, making it if ``load.creates``."""
        run = RunId(operation.lane)
        await self._compute.run(partial(self._trainer.put, run, state))
        if load.creates:
            self._note(run, operation, state, applied=operation.seq_id)

    async def _put_back(self, left: Snapshot) -> None:
        await self._compute.run(partial(self._trainer.put, left.run, left.state))
        self._residents[left.run] = _Resident(left.tenant, left.lease, left.seq_id, -1, self._nbytes(left.state))
        self.touch(left.run)

    def _note(
        self, run: RunId, operation: ReadyOperation, state: AdapterState, *, applied: int, snapshot: int = -1
    ) -> None:
        lease, nbytes = lease_of(operation), self._nbytes(state)
        self._residents[run] = _Resident(operation.tenant, lease, applied, snapshot, nbytes)
        self.touch(run)

    def _nbytes(self, state: AdapterState) -> int:
        return self.nbytes_of(state.weights.settings)

    # --- being there -----------------------------------------------------------------------------------------------

    def applied(self, run: RunId, seq_id: int) -> None:
        """Note that the effect of the run's operations up to ``seq_id`` is in memory."""
        resident = self._residents.get(run)
        if resident is not None:
            resident.applied_seq_id = max(resident.applied_seq_id, seq_id)
            self.touch(run)

    def touch(self, run: RunId) -> None:
        """Note that the adapter was used."""
        if (resident := self._residents.get(run)) is not None:
            self._uses += 1
            resident.last_used = self._uses

    def nbytes_of(self, settings: LoraSettings) -> int:
        """Return the bytes that training an adapter needs at most: weights, gradient and moments."""
        key = replace(settings, alpha=DEFAULT_ALPHA, seed=None)
        if (found := self._sizes.get(key)) is None:
            found = self._sizes[key] = largest_nbytes(self._trainer.base, settings)
        return found

    def has_room(self, run: RunId, nbytes: int, *, promised: int = 0, once_left: bool = False) -> bool:
        """Return whether the memory budget holds ``nbytes`` of the run's adapter beside all others.

        The others are the adapters in memory, adapters that are being brought in, ``promised`` bytes of adapters that come
        first, and the adapters being written to disk. With ``once_left`` the adapters being written do not count, since
        their memory is free once they are written. One adapter fits in any case.
        """
        others = promised + sum(resident.nbytes for resident in self._residents.values())
        # One that is there already, and is recorded yet, counts once.
        others += sum(size for one, size in self._arriving.items() if one not in self._residents)
        if not once_left:
            others += sum(snapshot.nbytes for snapshot in self._leaving.values() if snapshot.run != run)
        return not others or others + nbytes <= self._memory_bytes

    def expect(self, run: RunId, nbytes: int) -> None:
        """Keep memory for an adapter that is being brought in, until ``no_longer_expect``."""
        self._arriving[run] = nbytes

    def no_longer_expect(self, run: RunId) -> None:
        """Note that the adapter is in memory, or could not be brought in."""
        self._arriving.pop(run, None)

    def by_last_use(self, among: Iterable[RunId]) -> list[RunId]:
        """Return the resident runs of ``among``, that which has not been used for longest first."""
        residents = self._residents
        return sorted((run for run in among if run in residents), key=lambda run: residents[run].last_used)

    def nbytes_of_runs(self, runs: Iterable[RunId]) -> int:
        """Return the bytes of the runs' adapters in memory."""
        return sum(self._residents[run].nbytes for run in runs)

    def residents(self) -> list[RunId]:
        """Return the runs whose adapters are in memory."""
        return list(self._residents)

    # --- leaving ---------------------------------------------------------------------------------------------------

    def forget(self, run: RunId) -> None:
        """Drop the adapter from memory without writing it. The run's next operation rebuilds it."""
        self._residents.pop(run, None)
        self._leaving.pop(run, None)
        self._compute.submit(partial(self._trainer.unload, run))

    def page_out(self, run: RunId) -> None:
        """Move the adapter to disk: weights, gradient, moments and step count. No operation of the run may be under way."""
        snapshot, resident = self._capture(run), self._residents.pop(run)
        self._compute.submit(partial(self._trainer.unload, run))
        self._telemetry.paged_out()
        if snapshot.seq_id > resident.snapshot_seq_id:
            self._leaving[run] = snapshot
            self._begin(snapshot)

    def snapshot_if_due(self, run: RunId) -> None:
        """Begin a snapshot if enough operations came after the last snapshot. No operation of the run may be under way."""
        resident = self._residents.get(run)
        if resident and resident.applied_seq_id - resident.snapshot_seq_id >= self._snapshot_operations:
            self.snapshot(run)

    def snapshot(self, run: RunId) -> None:
        """Begin to write the run's whole training state durably, if any operation came after its last snapshot."""
        resident = self._residents.get(run)
        if resident is None or resident.applied_seq_id <= resident.snapshot_seq_id or self._snapshots.is_writing(run):
            return
        self._begin(self._capture(run))

    def unsaved(self) -> list[RunId]:
        """Return the runs whose last operation in memory is covered by no snapshot yet."""
        resident = [run for run, one in self._residents.items() if one.applied_seq_id > one.snapshot_seq_id]
        return [*resident, *self._leaving]

    async def snapshot_all(self, written: Callable[[RunId], Awaitable[None]]) -> None:
        """Snapshot every unsaved run, so that the next trainer replays nothing, and await ``written`` of each at once."""

        async def save(run: RunId) -> None:
            await self._snapshots.finished(run)
            self.snapshot(run)
            await self._snapshots.finished(run)
            await written(run)

        await asyncio.gather(*(save(run) for run in self.unsaved()))
        await self._snapshots.finished()

    def _capture(self, run: RunId) -> Snapshot:
        resident = self._residents[run]
        state = self._trainer.state(run)
        return Snapshot(run, resident.tenant, resident.lease, resident.applied_seq_id, state, resident.nbytes)

    def _begin(self, snapshot: Snapshot) -> None:
        def ended(done: asyncio.Task[bool]) -> None:
            if not done.cancelled() and done.result() and (resident := self._residents.get(snapshot.run)) is not None:
                resident.snapshot_seq_id = max(resident.snapshot_seq_id, snapshot.seq_id)
            if self._leaving.get(snapshot.run) is snapshot:
                del self._leaving[snapshot.run]
                self._on_room()

        self._snapshots.begin(snapshot).add_done_callback(ended)

    def _is_known(self, snapshot: Snapshot) -> bool:
        """Return False when the run was forgotten meanwhile. Some of its completions may then be missing in the ledger."""
        return snapshot.run in self._residents or snapshot.run in self._leaving
