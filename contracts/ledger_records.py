"""Records of operations (accepted requests): the typed form in which the ledger takes and returns its rows."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from uuid import uuid4

from contracts.errors import ErrorCategory, WeftError
from contracts.ids import CheckpointId, RequestId, RunId, TenantId
from contracts.operations import LoraSettings, OperationKind, Payload, Result, SampleOutput, Unreadable
from contracts.paths import CheckpointPath
from contracts.rate_lines import RateLine
from contracts.sample_demand import SampleDemand

UNLOAD_SEQ_ID = 2**62
"""seq_id of every ``unload_model``, which has none on the wire. An unload runs after everything that is ready in its lane."""


class OperationState(StrEnum):
    """State of an operation. ``done`` and ``failed`` are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """A payload as it is stored, packed by ``contracts.codec``. A large one is in a file: ``body`` is empty then."""

    body: bytes
    file_digest: bytes | None = None
    """Digest of the file's bytes. None: the payload is in ``body``."""
    file_bytes: int = 0
    encoded_bytes: int = 0
    """Size before compression, which limits count: a few kilobytes may hold millions of equal numbers."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that the payload takes, in the row or in the file."""
        return len(self.body) + self.file_bytes

    @property
    def counted_bytes(self) -> int:
        """Bytes that limits count."""
        return max(self.stored_bytes, self.encoded_bytes)


def new_request_id() -> RequestId:
    """Return a fresh id of an operation."""
    return RequestId(str(uuid4()))


@dataclass(frozen=True, slots=True)
class NewOperation:
    """An operation to accept."""

    tenant: TenantId
    lane: str
    """Id of the run or the sampler whose sequence the operation belongs to."""
    seq_id: int
    """Place in the lane; ``(lane, seq_id)`` is the idempotency key."""
    kind: OperationKind
    base_model: str
    payload: StoredPayload
    digest: bytes
    """Digest of the body, which tells a repeated request from a conflicting one."""
    tokens: int = 0
    """Tokens of the training data, or of the sample's prompt."""
    trainer: str | None = None
    """Trainer that leases the run, as far as known."""
    trace_id: str | None = None
    """Trace of the request that brings the operation."""
    key_id: int | None = None
    """Number of the API key of that request."""
    id: RequestId = field(default_factory=new_request_id)
    demand: SampleDemand | None = None
    """Most that a sample can take; None for training."""
    loads: CheckpointPath | None = None
    """Checkpoint that the operation loads."""
    granted: CheckpointId | None = None
    """The same by its id, where a key of its tenant gave access to it."""
    may_wait: bool = True
    """False for a sample that is refused when a rate would have it wait."""
    lines: tuple[RateLine, ...] = ()
    """Lines of its key's and its project's rates, which are charged with it beside its tenant's."""

    def rejected(self, error: WeftError) -> "RejectedOperation":
        """Return the record by which this operation fails at once with ``error``; a repeat finds it."""
        return RejectedOperation(
            tenant=self.tenant,
            lane=self.lane,
            seq_id=self.seq_id,
            kind=self.kind,
            base_model=self.base_model,
            digest=self.digest,
            error=error,
            trainer=self.trainer,
            trace_id=self.trace_id,
            key_id=self.key_id,
        )


@dataclass(frozen=True, slots=True)
class RejectedOperation:
    """A request that can never run but has used up its ``seq_id``. Fields as in ``NewOperation``."""

    tenant: TenantId
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    digest: bytes
    error: WeftError
    trainer: str | None = None
    trace_id: str | None = None
    key_id: int | None = None
    id: RequestId = field(default_factory=new_request_id)


@dataclass(frozen=True, slots=True)
class RunLease:
    """A trainer's right to write a run's results, valid while the run's row has the same trainer and token."""

    trainer: str
    token: int
    """Fencing token of the lease; grows whenever the run changes hands."""


@dataclass(frozen=True, slots=True)
class ReadyOperation:
    """An operation that may run now, with its payload decoded."""

    id: RequestId
    position: int
    """Order of acceptance in the whole service."""
    tenant: TenantId
    lane: str
    seq_id: int
    kind: OperationKind
    payload: Payload | Unreadable
    tokens: int
    lease: RunLease | None = None
    """Lease of the operation's run; None for samples."""
    trace_id: str | None = None
    accepted_at: datetime | None = None
    share: float = 1.0
    """Weight of the operation's tenant in the scheduler."""
    attempts: int = 0
    """Number of processes that ended while they computed the operation. Above 0 the operation is a suspect."""
    claim: int = 0
    """Fencing token of the sample's claim; grows whenever the sample changes hands. 0 for training."""
    is_replay: bool = False
    """True for an operation that is done, and is applied again to rebuild its run's adapter."""
    nbytes: int = 0
    """Bytes that a training operation's payload takes in memory, about."""
    has_progress: bool = False
    """True for a sample that another sampling process has begun (``tenants.sample_progress``)."""


def lease_of(operation: ReadyOperation) -> RunLease:
    """Return the lease under which the operation is computed. Raises ``ValueError`` if it has none."""
    if operation.lease is None:
        raise ValueError(f"operation {operation.id} came without its run's lease")
    return operation.lease


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """A training operation that is to run, without its payload. It may run once ``seq_id`` equals ``next_seq_id``."""

    id: RequestId
    position: int
    """Order of acceptance in the whole service."""
    tenant: TenantId
    run: RunId
    seq_id: int
    kind: OperationKind
    tokens: int
    next_seq_id: int
    """seq_id that may run next in the run."""
    share: float
    """Weight of the operation's tenant in the scheduler."""
    lease: RunLease
    """Lease of the run, held by the trainer that asked."""
    lora: LoraSettings
    """Settings of the run's adapter."""
    trace_id: str | None = None
    is_replay: bool = False
    """True for an operation that is done, and is to be applied again."""
    starts_at: float = 0.0
    """Monotonic seconds from which on its tenant's rate and budgets let it run, as far as known now."""
    weight: float = 1.0
    """Weight of the run among the runs of its tenant."""
    nbytes: int = 0
    """Bytes that the payload will take in memory, about."""


@dataclass(frozen=True, slots=True)
class LanePosition:
    """Progress of a run's lane: every operation before ``next_seq_id`` is final."""

    next_seq_id: int
    done_seq_id: int
    """Last operation before ``next_seq_id`` that has changed the adapter or may have; -1: none. Failed ones have not.

    At least the last one that the snapshot covers, whatever that was: rows before it may be forgotten.
    """


@dataclass(frozen=True, slots=True)
class Completion:
    """End of an operation: its result, or the error it failed with.

    ``drawn`` and ``cached`` are the tokens of a failed sample that count as usage.
    """

    operation: ReadyOperation
    outcome: Result | WeftError
    drawn: int = 0
    cached: int = 0

    @property
    def sampled(self) -> tuple[int, int]:
        """Drawn tokens and cached prompt tokens that count, both 0 unless the operation is a sample."""
        if isinstance(self.outcome, SampleOutput):
            return self.outcome.drawn, self.outcome.prompt_cache_hit_tokens
        return self.drawn, self.cached


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """State of an operation, as ``retrieve_future`` reads it before the result."""

    id: RequestId
    tenant: TenantId
    kind: OperationKind
    lane: str
    state: OperationState
    result_bytes: int | None
    """Size of the encoded result; None unless the operation is done."""
    pruned: bool
    """True once the result was deleted after its grace time."""
    error_code: str | None
    error_category: ErrorCategory
    error_message: str | None
    body: bytes | None = None
    """Encoded result, if it is small enough to be read together with the status."""
