"""Tables of the ledger. Hot rows (operations) and large bytes (payloads, results) are apart."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Integer, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from contracts.ledger_records import OperationState
from store.tables.base import Base, partial_index

_IS_PENDING_SAMPLE = text("state = 'pending' AND kind = 'sample'")
_IS_WAITING_SAMPLE = text("state = 'pending' AND kind = 'sample' AND taken_by IS NULL AND held_by IS NULL")
_IS_CLAIMED_SAMPLE = text("state = 'pending' AND kind = 'sample' AND taken_by IS NOT NULL")
_IS_HELD_SAMPLE = text("state = 'pending' AND kind = 'sample' AND held_by IS NOT NULL")
_IS_PENDING_TRAINING = text("state = 'pending' AND kind <> 'sample'")
_IS_FAILED = text("state = 'failed'")
_IS_UNPRUNED = text("finished_at IS NOT NULL AND pruned_at IS NULL")
_IS_ENDED_SAMPLE = text("kind = 'sample' AND finished_at IS NOT NULL")


class Operation(Base):
    """An accepted request, as a row of the ledger.

    - ``position``: order of acceptance in the whole service.
    - ``lane``: run or sampler whose sequence the operation belongs to.
    - ``(lane, seq_id)``: idempotency key.
    - ``trace_id``: trace of the request that brought the operation.
    - ``taken_by``: process that claimed the sample.
    - ``claims``: number of claims of the sample, the fencing token of the latest one.
    - ``attempts``: number of processes that ended while they computed the operation.
    - ``held_by``: run whose closed gate holds the sample, which nobody claims until the gate is open.
    - ``key_id``: API key of the request that brought the operation.
    - ``payload_bytes``: size of the encoded payload before compression.
    - ``reserved_tokens``: tokens that a sample may take at most, its prompt and every sequence to ``max_tokens``.
    - ``tokens``: tokens of training data; of a sample its prompt's and, once it has ended, ``sampled_tokens``.
    - ``cached_tokens``: tokens of the prompt that the replica found in its cache.
    - ``rate_mark``: place in the line of its tenant's rate, which it waits for; None: it was accepted without a rate.
    - ``told_as``: number under which the lane's clients are told that the sample has ended (``ledger.told_ends``).
    """

    __tablename__ = "operations"

    position: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    id: Mapped[str] = mapped_column(String(36), unique=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    lane: Mapped[str] = mapped_column(String(100))
    seq_id: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(32))
    base_model: Mapped[str] = mapped_column(String(500))
    state: Mapped[str] = mapped_column(String(16), default=OperationState.PENDING)
    body_digest: Mapped[bytes]
    tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    trace_id: Mapped[str | None] = mapped_column(String(32))
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_category: Mapped[str | None] = mapped_column(String(16))
    error_message: Mapped[str | None] = mapped_column(Text)
    result_bytes: Mapped[int | None] = mapped_column(BigInteger)
    pruned_at: Mapped[datetime | None]
    taken_by: Mapped[str | None] = mapped_column(String(64))
    attempts: Mapped[int] = mapped_column(server_default="0")
    held_by: Mapped[str | None] = mapped_column(String(100))
    key_id: Mapped[int | None]
    payload_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    reserved_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    told_as: Mapped[int | None] = mapped_column(BigInteger)
    sampled_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cached_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    rate_mark: Mapped[int | None] = mapped_column(BigInteger)
    claims: Mapped[int] = mapped_column(server_default="0")

    __table_args__ = (
        UniqueConstraint("lane", "seq_id"),
        partial_index("ix_operations_pending_training", "base_model", "position", where=_IS_PENDING_TRAINING),
        partial_index(
            "ix_operations_pending_samples_waiting", "base_model", "tenant_id", "position", where=_IS_WAITING_SAMPLE
        ),
        partial_index("ix_operations_pending_samples_claimed", "taken_by", where=_IS_CLAIMED_SAMPLE),
        partial_index("ix_operations_pending_samples_held", "base_model", "held_by", where=_IS_HELD_SAMPLE),
        partial_index("ix_operations_pending_samples", "tenant_id", "reserved_tokens", where=_IS_PENDING_SAMPLE),
        partial_index("ix_operations_pending_bytes", "tenant_id", "payload_bytes", where=_IS_PENDING_TRAINING),
        partial_index("ix_operations_failed", "position", where=_IS_FAILED),
        partial_index("ix_operations_failed_of_tenant", "tenant_id", "position", where=_IS_FAILED),
        partial_index("ix_operations_unpruned", "finished_at", where=_IS_UNPRUNED),
        partial_index("ix_operations_unpruned_of_tenant", "tenant_id", "finished_at", where=_IS_UNPRUNED),
        partial_index("ix_operations_ended_samples", "lane", "told_as", where=_IS_ENDED_SAMPLE),
    )


class OperationPayload(Base):
    """An operation's payload as ``contracts.codec`` bytes, kept until a snapshot covers the operation.

    A large payload is in a file of the data folder. ``body`` is then empty, and ``file_digest`` is the file's digest.
    """

    __tablename__ = "operation_payloads"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]
    file_digest: Mapped[bytes | None]
    kept_for_replay: Mapped[bool] = mapped_column(server_default=false())
    """Written by processes of an older version only, which may still run during an upgrade."""


class OperationResult(Base):
    """An operation's result as ``contracts.codec`` bytes, pruned after the grace time."""

    __tablename__ = "operation_results"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]
