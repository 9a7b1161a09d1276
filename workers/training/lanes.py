"""Training operations of one base model in memory: a lane for each run, its operations strictly by seq_id.

A lane holds a run's pending operations as the ledger has them. It also holds how far memory is ahead of the ledger:
operations that have been computed and whose completions are not written yet. While an adapter is rebuilt, the operations
since its snapshot stand before the pending ones, as *replays*. No I/O here.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

from contracts.errors import EngineFailure, WeftError
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, PendingOperation, ReadyOperation, RunLease
from contracts.operations import LoadWeights, LoraSettings, OperationKind, TrainingBatch, Unreadable
from engine.training.pass_operation import PassOperation

PASS_KINDS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})
LOOKAHEAD_OPERATIONS = 8
"""Operations of one lane whose payloads are kept in memory ahead of their turn, at most."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Operations that an adapter in memory lacks. ``next_seq_id`` is the first that the ledger does not call final.

    ``replayed`` is the number of operations applied again, ``replays`` those that still are to be. ``began`` is the moment
    of the rebuild's begin, by ``perf_counter``.
    """

    next_seq_id: int
    replays: Sequence[PendingOperation]
    replayed: int
    began: float


@dataclass(slots=True)
class Lane:
    """One run's operations from ``next_seq_id`` on."""

    run: RunId
    tenant: TenantId
    share: float
    next_seq_id: int
    lease: RunLease
    lora: LoraSettings
    waiting: dict[int, PendingOperation] = field(default_factory=dict)
    """Operations known without payload, by seq_id."""
    loaded: dict[int, ReadyOperation] = field(default_factory=dict)
    """Operations with payload, by seq_id."""
    started: dict[RequestId, PassOperation] = field(default_factory=dict)
    """Forward and forward_backward operations that are in passes."""
    is_busy: bool = False
    """An operation on the whole adapter is under way, or the adapter is on its way into memory."""
    has_just_arrived: bool = False
    """No operation has run since the adapter came into memory."""
    is_dropped: bool = False
    """Memory and ledger may differ: results that are still computed for this lane must not be written."""
    is_held: bool = False
    """An operator has the run leave, or its tenant wait: nothing new begins."""
    unwritten: int = 0
    """Completions on their way to the ledger."""
    rebuild: Rebuild | None = None
    """Rebuild whose replays are not all applied yet. While there is one, nothing but its replays runs."""
    weight: float = 1.0
    """Weight of the run among the runs of its tenant."""
    failing_since: float | None = None
    """Monotonic seconds of the first of the tries in a row that could not bring the adapter in."""
    lacks_room_since: float | None = None
    """Monotonic seconds since which the adapter waits for room in memory."""
    restore_failure: WeftError | None = None
    """Reason why the adapter could not be rebuilt. The next pending operation fails with it."""

    @property
    def head(self) -> ReadyOperation | None:
        """The operation that may run now; None while there is none, or its payload is not loaded.

        Of a held lane only one that has begun.
        """
        found = self.loaded.get(self.next_seq_id)
        if found is None and self.next_seq_id not in self.waiting:
            # An unload runs even after a hole in the seq_ids: it ends the lane, and no other operation can run.
            found = self.loaded.get(UNLOAD_SEQ_ID)
        if found is not None and self.is_held and found.id not in self.started:
            return None
        return found

    @property
    def has_work(self) -> bool:
        """True when any operation is known."""
        return bool(self.waiting or self.loaded)

    @property
    def starts_at(self) -> float:
        """Monotonic seconds at which the next operation may be loaded, if that waits for a rate; infinity otherwise."""
        pending = self.waiting.get(self.next_seq_id)
        return inf if pending is None or pending.starts_at <= monotonic() else pending.starts_at

    @property
    def has_hole(self) -> bool:
        """True when operations are known but not the next one, which may have been rejected and so be final already."""
        return self.has_work and self.next_seq_id not in self.loaded and self.next_seq_id not in self.waiting

    def passes(self) -> Iterator[ReadyOperation]:
        """Yield the forward and forward_backward operations that may run before the next operation of another kind.

        A suspect runs alone, once it is the next. Of a held lane run only operations that have begun. Pending operations
        wait for the last replay.
        """
        seq_id = self.next_seq_id
        while (operation := self.loaded.get(seq_id)) is not None and isinstance(operation.payload, TrainingBatch):
            if self.rebuild is not None and not operation.is_replay:
                return
            if operation.attempts and seq_id > self.next_seq_id:
                return
            if self.is_held and operation.id not in self.started:
                return
            yield operation
            if operation.attempts:
                return
            seq_id = self._after(seq_id)

    def to_load(self, token_budget: int) -> list[PendingOperation]:
        """Return the operations whose payloads a pass of ``token_budget`` tokens needs when this lane alone fills it.

        One that waits for its tenant's rate or budget is not loaded, and neither is what comes after it.
        At most ``LOOKAHEAD_OPERATIONS`` are looked at.
        """
        chosen: list[PendingOperation] = []
        tokens, seq_id = 0, self.next_seq_id
        for _ in range(LOOKAHEAD_OPERATIONS):
            if (ready := self.loaded.get(seq_id)) is not None:
                tokens += ready.tokens
            elif (pending := self.waiting.get(seq_id)) is not None and pending.starts_at <= monotonic():
                chosen.append(pending)
                tokens += pending.tokens
            else:
                break
            seq_id = self._after(seq_id)
            if tokens >= token_budget:
                break
        if self.next_seq_id not in self.loaded and not chosen and UNLOAD_SEQ_ID in self.waiting:
            chosen.append(self.waiting[UNLOAD_SEQ_ID])
        return chosen

    def finish(self, operation: ReadyOperation) -> None:
        """Move the lane past the operation, which has run."""
        self.has_just_arrived = False
        self.loaded.pop(operation.seq_id, None)
        self.started.pop(operation.id, None)
        if operation.seq_id != UNLOAD_SEQ_ID:
            self.move_to(self._after(operation.seq_id))

    def _after(self, seq_id: int) -> int:
        """Return the seq_id that comes next. Between replays are operations that have no effect: those are passed over."""
        seq_id += 1
        if self.rebuild is not None:
            while seq_id < self.rebuild.next_seq_id and seq_id not in self.waiting and seq_id not in self.loaded:
                seq_id += 1
        return seq_id

    def begin_rebuild(self, rebuild: Rebuild, pending: ReadyOperation) -> None:
        """Set the lane back to where the adapter in memory stands. ``pending`` is the operation that the rebuild is for.

        A replay takes the place of ``pending`` in the order of acceptance.
        """
        self._forget_before(rebuild.next_seq_id)
        self.restore_failure = None
        for one in rebuild.replays:
            self.waiting[one.seq_id] = replace(one, position=pending.position)
        self.rebuild = rebuild if rebuild.replays else None
        self.next_seq_id = rebuild.replays[0].seq_id if rebuild.replays else rebuild.next_seq_id

    def end_rebuild(self, failure: WeftError | None) -> None:
        """Go on with the pending operations: the replays are applied, or the next operation is to fail with ``failure``."""
        if self.rebuild is None:
            return
        next_seq_id, self.rebuild, self.restore_failure = self.rebuild.next_seq_id, None, failure
        self.end_started()
        self.move_to(next_seq_id)

    def end_started(self) -> None:
        """End what is in passes: passes under way must not reach the adapter, which may be in memory again when they end."""
        for operation in self.started.values():
            operation.end(EngineFailure("the run is rebuilt from the ledger"))
        self.started.clear()

    def move_to(self, next_seq_id: int) -> None:
        """Go on at ``next_seq_id`` or later, and drop the operations before it."""
        self.next_seq_id = max(self.next_seq_id, next_seq_id)
        self._forget_before(self.next_seq_id)

    def _forget_before(self, next_seq_id: int) -> None:
        for known in (self.waiting, self.loaded):
            for seq_id in [seq_id for seq_id in known if seq_id < next_seq_id]:
                del known[seq_id]


class Lanes:
    """Lanes of one base model that have work, or completions on their way to the ledger."""

    def __init__(self) -> None:
        self._lanes: dict[RunId, Lane] = {}
        self._held: frozenset[RunId] = frozenset()
        self._waiting_tenants: frozenset[TenantId] = frozenset()
        self.cursor = 0
        """Position up to which accepted operations are known."""
        self.resets = 0
        """Number of times that every pending operation was to be read again."""
        self._known: set[int] = set()
        """Positions of operations that were added, as far as they are looked at again."""

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def get(self, run: RunId) -> Lane | None:
        """Return the run's lane, None if it has none."""
        return self._lanes.get(run)

    def hold(self, runs: Collection[RunId], tenants: frozenset[TenantId]) -> bool:
        """Hold the lanes of ``runs`` and of ``tenants``, and no others. Return whether a lane is free that was held."""
        before = [lane for lane in self if lane.is_held]
        self._held, self._waiting_tenants = frozenset(runs), tenants
        for lane in self:
            lane.is_held = self._is_held(lane)
        return any(not lane.is_held for lane in before)

    def _is_held(self, lane: Lane) -> bool:
        return lane.run in self._held or lane.tenant in self._waiting_tenants

    def look_at_all(self) -> None:
        """Have every pending operation read again."""
        self.cursor = 0
        self.resets += 1
        self._known.clear()

    def known_after(self, position: int) -> set[int]:
        """Return the positions beyond ``position`` of operations that were added, and forget the others."""
        self._known = {one for one in self._known if one > position}
        return self._known

    def add_pending(self, pending: Sequence[PendingOperation]) -> None:
        """Add operations that are pending in the ledger: all of this trainer's up to the last one's position."""
        self.add_some(pending)
        for operation in pending:
            self.cursor = max(self.cursor, operation.position)
            self._known.add(operation.position)

    def add_some(self, pending: Iterable[PendingOperation]) -> None:
        """Add operations that are pending in the ledger, beside which others may be."""
        for operation in pending:
            lane = self._lanes.get(operation.run)
            if lane is None:
                lane = _lane_of(operation)
                lane.is_held = self._is_held(lane)
                self._lanes[operation.run] = lane
            lane.share, lane.weight = operation.share, operation.weight
            first = lane.next_seq_id if lane.rebuild is None else lane.rebuild.next_seq_id
            if operation.seq_id >= first and operation.seq_id not in lane.loaded:
                lane.waiting[operation.seq_id] = operation

    def add_payloads(self, operations: Sequence[ReadyOperation]) -> None:
        """Add operations with their payloads. Operations that no lane waits for any more are left out."""
        for operation in operations:
            lane = self._lanes.get(RunId(operation.lane))
            known = None if lane is None else lane.waiting.pop(operation.seq_id, None)
            if lane is not None and known is not None:
                lane.loaded[operation.seq_id] = replace(
                    operation, lease=lane.lease, position=known.position, is_replay=known.is_replay, nbytes=known.nbytes
                )

    def drop(self, run: RunId) -> Lane | None:
        """Drop a lane whose memory may differ from the ledger, and return it. The next look makes a new lane."""
        lane = self._lanes.pop(run, None)
        # The new lane must know every operation, also those accepted long before.
        self.look_at_all()
        if lane is not None:
            lane.is_dropped = True
            lane.end_started()
        return lane

    def drop_idle(self) -> None:
        """Drop lanes with no work and no completions on their way."""
        for lane in self:
            if not (lane.has_work or lane.is_busy or lane.unwritten or lane.started):
                del self._lanes[lane.run]


def _lane_of(operation: PendingOperation) -> Lane:
    return Lane(
        operation.run, operation.tenant, operation.share, operation.next_seq_id, operation.lease, operation.lora
    )


def is_unreadable(operation: ReadyOperation) -> bool:
    """Return whether the operation cannot be run, because what was recorded of it cannot be read."""
    return isinstance(operation.payload, Unreadable)


def creates(operation: ReadyOperation) -> bool:
    """Return whether the operation makes its run."""
    if operation.kind is OperationKind.CREATE_MODEL or is_unreadable(operation):
        return operation.seq_id == 0
    return isinstance(operation.payload, LoadWeights) and operation.payload.creates
