"""Typed views of ledger rows."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from contracts.errors import ErrorCategory, WeftError
from contracts.ids import RequestId, RunId, TenantId
from contracts.operations import OperationKind, Payload, Result

UNLOAD_SEQ_ID = 2**62
"""``unload_model`` carries no seq_id: it takes this one, after everything the lane has ready."""


class OperationState(StrEnum):
    """Life of an operation. ``done`` and ``failed`` are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NewOperation:
    """An operation to accept. ``lane`` is the run or sampler id; ``digest`` tells a repeat from a conflict.

    ``trainer`` is the one that has the run, as far as is known; ``trace_id`` is that of the request which brings it.
    """

    tenant: TenantId
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    payload: Payload
    digest: bytes
    tokens: int = 0
    trainer: str | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class RejectedOperation:
    """A request that can never run but has consumed its ``seq_id``."""

    tenant: TenantId
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    digest: bytes
    error: WeftError
    trainer: str | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class RunLease:
    """A trainer's right to write what a run's operations do: valid while the run's row has the same trainer and token."""

    trainer: str
    token: int


@dataclass(frozen=True, slots=True)
class ReadyOperation:
    """An operation that may run now, payload decoded. ``position`` is its order of acceptance; ``share`` its tenant's.

    ``lease`` is that of its run, for what is about to be computed; None for samples and replays.
    """

    id: RequestId
    position: int
    tenant: TenantId
    lane: str
    seq_id: int
    kind: OperationKind
    payload: Payload
    tokens: int
    lease: RunLease | None = None
    trace_id: str | None = None
    accepted_at: datetime | None = None
    share: float = 1.0


def lease_of(operation: ReadyOperation) -> RunLease:
    """The lease under which the operation is computed. Raises ``ValueError`` for one that is not to be."""
    if operation.lease is None:
        raise ValueError(f"operation {operation.id} came without its run's lease")
    return operation.lease


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """An accepted training operation without its payload; its run's ``next_seq_id`` and lease, its tenant's ``share``."""

    id: RequestId
    position: int
    tenant: TenantId
    run: RunId
    seq_id: int
    kind: OperationKind
    tokens: int
    next_seq_id: int
    share: float
    lease: RunLease
    trace_id: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """How an operation ended: a result or an error, never both."""

    operation: ReadyOperation
    outcome: Result | WeftError


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """What ``retrieve_future`` needs to know before it reads the result."""

    id: RequestId
    tenant: TenantId
    kind: OperationKind
    lane: str
    state: OperationState
    result_bytes: int | None
    pruned: bool
    error_code: str | None
    error_category: ErrorCategory
    error_message: str | None
    body: bytes | None = None
    """Of a result that is small enough to be read along."""
