"""Training operations of one base model in memory: a lane for each run, its operations strictly by seq_id.

A lane holds a run's pending operations as the ledger has them. It also holds how far memory is ahead of the ledger:
operations that have been computed and whose completions are not written yet. No I/O here.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from contracts.errors import EngineFailure
from contracts.ids import RequestId, RunId, TenantId
from contracts.ledger_records import UNLOAD_SEQ_ID, PendingOperation, ReadyOperation, RunLease
from contracts.operations import LoadWeights, OperationKind, TrainingBatch, Unreadable
from engine.training.pass_operation import PassOperation

PASS_KINDS = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})
LOOKAHEAD_OPERATIONS = 8
"""Operations of one lane whose payloads are kept in memory ahead of their turn, at most."""


@dataclass(slots=True)
class Lane:
    """One run's operations from ``next_seq_id`` on."""

    run: RunId
    tenant: TenantId
    share: float
    next_seq_id: int
    lease: RunLease
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
    def lacks_payload(self) -> bool:
        """True when the next operation is known and its payload is not loaded."""
        return self.head is None and (self.next_seq_id in self.waiting or UNLOAD_SEQ_ID in self.waiting)

    @property
    def has_hole(self) -> bool:
        """True when operations are known but not the next one, which may have been rejected and so be final already."""
        return self.has_work and self.next_seq_id not in self.loaded and self.next_seq_id not in self.waiting

    def passes(self) -> Iterator[ReadyOperation]:
        """Yield the forward and forward_backward operations that may run before the next operation of another kind.

        A suspect runs alone, once it is the next. Of a held lane run only operations that have begun.
        """
        seq_id = self.next_seq_id
        while (operation := self.loaded.get(seq_id)) is not None and isinstance(operation.payload, TrainingBatch):
            if operation.attempts and seq_id > self.next_seq_id:
                return
            if self.is_held and operation.id not in self.started:
                return
            yield operation
            if operation.attempts:
                return
            seq_id += 1

    def to_load(self, token_budget: int) -> list[PendingOperation]:
        """Return the operations whose payloads a pass of ``token_budget`` tokens needs when this lane alone fills it.

        At most ``LOOKAHEAD_OPERATIONS`` are looked at.
        """
        chosen: list[PendingOperation] = []
        tokens, seq_id = 0, self.next_seq_id
        for _ in range(LOOKAHEAD_OPERATIONS):
            if (ready := self.loaded.get(seq_id)) is not None:
                tokens += ready.tokens
            elif (pending := self.waiting.get(seq_id)) is not None:
                chosen.append(pending)
                tokens += pending.tokens
            else:
                break
            seq_id += 1
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
            self.move_to(operation.seq_id + 1)

    def move_to(self, next_seq_id: int) -> None:
        """Go on at ``next_seq_id`` or later, and drop the operations before it."""
        self.next_seq_id = max(self.next_seq_id, next_seq_id)
        for known in (self.waiting, self.loaded):
            for seq_id in [seq_id for seq_id in known if seq_id < self.next_seq_id]:
                del known[seq_id]


class Lanes:
    """Lanes of one base model that have work, or completions on their way to the ledger."""

    def __init__(self) -> None:
        self._lanes: dict[RunId, Lane] = {}
        self._held: frozenset[RunId] = frozenset()
        self._waiting_tenants: frozenset[TenantId] = frozenset()
        self.cursor = 0
        """Position up to which accepted operations are known."""

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

    def add_pending(self, pending: Iterable[PendingOperation]) -> None:
        """Add operations that are pending in the ledger."""
        for operation in pending:
            self.cursor = max(self.cursor, operation.position)
            lane = self._lanes.get(operation.run)
            if lane is None:
                lane = Lane(operation.run, operation.tenant, operation.share, operation.next_seq_id, operation.lease)
                lane.is_held = self._is_held(lane)
                self._lanes[operation.run] = lane
            lane.share = operation.share
            if operation.seq_id >= lane.next_seq_id and operation.seq_id not in lane.loaded:
                lane.waiting[operation.seq_id] = operation

    def add_payloads(self, operations: Sequence[ReadyOperation]) -> None:
        """Add operations with their payloads. Operations that no lane waits for any more are left out."""
        for operation in operations:
            lane = self._lanes.get(RunId(operation.lane))
            if lane is not None and lane.waiting.pop(operation.seq_id, None) is not None:
                lane.loaded[operation.seq_id] = replace(operation, lease=lane.lease)

    def drop(self, run: RunId) -> Lane | None:
        """Drop a lane whose memory may differ from the ledger, and return it. The next full look makes a new lane."""
        lane = self._lanes.pop(run, None)
        if lane is not None:
            lane.is_dropped = True
            for operation in lane.started.values():
                # Passes under way must not reach the adapter, which may be in memory again when they end.
                operation.end(EngineFailure("the run is rebuilt from the ledger"))
        return lane

    def drop_idle(self) -> None:
        """Drop lanes with no work and no completions on their way."""
        for lane in self:
            if not (lane.has_work or lane.is_busy or lane.unwritten or lane.started):
                del self._lanes[lane.run]


def is_unreadable(operation: ReadyOperation) -> bool:
    """Return whether the operation cannot be run, because what was recorded of it cannot be read."""
    return isinstance(operation.payload, Unreadable)


def creates(operation: ReadyOperation) -> bool:
    """Return whether the operation makes its run."""
    if operation.kind is OperationKind.CREATE_MODEL or is_unreadable(operation):
        return operation.seq_id == 0
    return isinstance(operation.payload, LoadWeights) and operation.payload.creates
