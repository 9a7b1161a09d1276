"""The database's tables as SQLAlchemy classes.

Alembic makes the schema (``migrations/``); ``tests/migrations`` proves that both agree. Every row that belongs to a tenant
names it. Times are UTC. Hot rows (operations) and large bytes (payloads, results) are in separate tables.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint, false, text
from sqlalchemy.orm import Mapped, mapped_column

from contracts.ledger_records import OperationState

# Re-exported: ``Base.metadata`` knows every table once this module is imported.
from store.table_base import Base as Base
from store.table_base import partial_index


class RunState(StrEnum):
    """State of a run's adapter."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"


class Tenant(Base):
    """An owner of sessions, runs and checkpoints. ``share`` is its weight against other tenants in the scheduler."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    share: Mapped[float] = mapped_column(Float, default=1.0)
    created_at: Mapped[datetime]


class ApiKey(Base):
    """An API key. Only the secret's SHA-256 is stored. ``prefix`` finds the row and names the key to people."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(32), unique=True)
    secret_hash: Mapped[bytes]
    note: Mapped[str] = mapped_column(String(200), default="")
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class Session(Base):
    """A session of one SDK client."""

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any] | None]
    sdk_version: Mapped[str] = mapped_column(String(64), default="")
    project_id: Mapped[str | None] = mapped_column(String(200))
    display_name: Mapped[str | None] = mapped_column(String(200))
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime] = mapped_column(index=True)
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None] = mapped_column(String(32))
    end_detail: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (Index("ix_sessions_tenant_id_created_at", "tenant_id", "created_at"),)


class Run(Base):
    """A training run: one adapter over one base model.

    - ``next_seq_id``: seq_id of the operation that may run next.
    - ``snapshot_seq_id``: last operation in the durable snapshot, -1 before the first.
    - ``snapshot_dir``: the snapshot's folder, relative to the data folder.
    - ``trainer_id``: process that leases the run and alone may write its results.
    - ``lease_token``: fencing token; grows with every lease.
    """

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(100), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    model_seq_id: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str] = mapped_column(String(500))
    rank: Mapped[int]
    alpha: Mapped[float]
    seed: Mapped[int] = mapped_column(BigInteger)
    train_attn: Mapped[bool]
    train_mlp: Mapped[bool]
    train_unembed: Mapped[bool]
    user_metadata: Mapped[dict[str, str] | None]
    state: Mapped[str] = mapped_column(String(16), default=RunState.CREATING)
    next_seq_id: Mapped[int] = mapped_column(BigInteger, default=0)
    snapshot_seq_id: Mapped[int] = mapped_column(BigInteger, default=-1)
    snapshot_dir: Mapped[str | None] = mapped_column(String(500))
    trainer_id: Mapped[str | None] = mapped_column(String(64), index=True)
    lease_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_at: Mapped[datetime]
    last_request_at: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint("session_id", "model_seq_id"),
        Index("ix_runs_tenant_id_created_at", "tenant_id", "created_at"),
    )


class Checkpoint(Base):
    """A saved version of an adapter. ``directory`` is its immutable folder, relative to the data folder.

    ``listed`` is false for versions without a name, made by ``save_weights_and_get_sampling_client``.
    """

    __tablename__ = "checkpoints"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    segment: Mapped[str] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(String(200))
    directory: Mapped[str] = mapped_column(String(500))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    listed: Mapped[bool] = mapped_column(default=True)
    public: Mapped[bool] = mapped_column(default=False)
    user_metadata: Mapped[dict[str, str] | None]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None] = mapped_column(index=True)

    __table_args__ = (
        UniqueConstraint("run_id", "segment", "name"),
        Index("ix_checkpoints_tenant_id_created_at", "tenant_id", "created_at"),
    )


class Sampler(Base):
    """A sampling session, which samples from one of three things.

    - Pinned: from ``checkpoint_id``.
    - Live: from the newest version of ``live_run_id``, which ``checkpoint_id`` then names.
    - Neither set: from the bare base.

    ``publications`` counts the versions that a live sampler has followed. A live sampler's sample that falls more than
    ``max_version_lag`` publications behind (None: no limit) is handled as ``on_stale`` says.
    """

    __tablename__ = "samplers"

    id: Mapped[str] = mapped_column(String(100), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    sampling_session_seq_id: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str] = mapped_column(String(500))
    model_path: Mapped[str | None] = mapped_column(String(500))
    checkpoint_id: Mapped[str | None] = mapped_column(String(32), index=True)
    live_run_id: Mapped[str | None] = mapped_column(String(100), index=True)
    created_at: Mapped[datetime]
    publications: Mapped[int] = mapped_column(BigInteger, server_default="0")
    max_version_lag: Mapped[int | None]
    on_stale: Mapped[str | None] = mapped_column(String(8))

    __table_args__ = (UniqueConstraint("session_id", "sampling_session_seq_id"),)


_IS_PENDING_SAMPLE = text("state = 'pending' AND kind = 'sample'")
_IS_PENDING_TRAINING = text("state = 'pending' AND kind <> 'sample'")
_IS_UNPRUNED = text("finished_at IS NOT NULL AND pruned_at IS NULL")
_IS_KEPT = text("kept_for_replay")


class Operation(Base):
    """An accepted request, as a row of the ledger.

    - ``position``: order of acceptance in the whole service.
    - ``lane``: run or sampler whose sequence the operation belongs to.
    - ``(lane, seq_id)``: idempotency key.
    - ``trace_id``: trace of the request that brought the operation.
    - ``taken_by``: process that claimed the sample.
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

    __table_args__ = (
        UniqueConstraint("lane", "seq_id"),
        partial_index("ix_operations_pending_training", "base_model", "position", where=_IS_PENDING_TRAINING),
        partial_index("ix_operations_pending_samples_of_base", "base_model", "position", where=_IS_PENDING_SAMPLE),
        partial_index("ix_operations_pending_samples", "tenant_id", where=_IS_PENDING_SAMPLE),
        partial_index("ix_operations_unpruned", "finished_at", where=_IS_UNPRUNED),
    )


class OperationPayload(Base):
    """An operation's payload as ``contracts.codec`` bytes, kept until a snapshot covers the operation.

    ``kept_for_replay`` is set when the operation's result is pruned while a replay still needs the payload.
    """

    __tablename__ = "operation_payloads"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]
    kept_for_replay: Mapped[bool] = mapped_column(server_default=false())

    __table_args__ = (partial_index("ix_operation_payloads_kept", "operation_id", where=_IS_KEPT),)


class OperationResult(Base):
    """An operation's result as ``contracts.codec`` bytes, pruned after the grace time."""

    __tablename__ = "operation_results"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]


class AdapterGate(Base):
    """A gate before the samples of one run's adapter, or of a whole base model (``run_id`` is then ``pool:NAME``).

    The gate is open while ``mode`` is None, or once ``expires_at`` has passed. ``generation`` grows with every change; the
    other columns mean nothing while the gate is open.
    """

    __tablename__ = "adapter_gates"

    run_id: Mapped[str] = mapped_column(String(520), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    base_model: Mapped[str] = mapped_column(String(500), index=True)
    generation: Mapped[int] = mapped_column(BigInteger, default=0)
    mode: Mapped[str | None] = mapped_column(String(8))
    reason: Mapped[str | None] = mapped_column(String(500))
    since: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class DirectedReplica(Base):
    """An operator's directive for one replica of a base model. A replica without a row works normally."""

    __tablename__ = "ordered_replicas"

    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    replica: Mapped[str] = mapped_column(String(200), primary_key=True)
    wanted: Mapped[str] = mapped_column(String(8))
    reason: Mapped[str | None] = mapped_column(String(500))
    since: Mapped[datetime]


class SampleInFlight(Base):
    """A sample that a replica computes now.

    ``version`` is the id of a checkpoint of ``run_id``. Both are None for the bare base.
    """

    __tablename__ = "samples_in_flight"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    base_model: Mapped[str] = mapped_column(String(500))
    run_id: Mapped[str | None] = mapped_column(String(100), index=True)
    version: Mapped[str | None] = mapped_column(String(32))
    replica: Mapped[str] = mapped_column(String(200))
    process: Mapped[str] = mapped_column(String(64), index=True)
    since: Mapped[datetime]


class SampleReport(Base):
    """A sample's report as ``contracts.sample_report`` bytes, pruned with the result."""

    __tablename__ = "sample_reports"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]


class WorkerProcess(Base):
    """A process that trains or samples ``base_model``. Its lease ends at ``expires_at``, by the database's clock."""

    __tablename__ = "worker_processes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(500))
    host: Mapped[str] = mapped_column(String(200))
    pid: Mapped[int]
    started_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class Placement(Base):
    """A run that has work and no trainer. A cluster announces it until a trainer claims it.

    ``announced_at``: last sent to the broker.
    """

    __tablename__ = "placements"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    base_model: Mapped[str] = mapped_column(String(500), index=True)
    created_at: Mapped[datetime]
    announced_at: Mapped[datetime | None]


class VersionCommand(Base):
    """A command to the sampling process ``process_id`` to load or to forget a version.

    ``done_at`` is None until the command is carried out. ``error_message`` says why it failed.
    """

    __tablename__ = "version_orders"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    process_id: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    run_id: Mapped[str | None] = mapped_column(String(100))
    version: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    done_at: Mapped[datetime | None]
    error_message: Mapped[str | None] = mapped_column(Text)


class UsageDay(Base):
    """A tenant's usage on ``day`` (ISO, UTC): successful operations, and the tokens that were trained or sampled."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    operations: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)


class DownloadLink(Base):
    """A link to a checkpoint's files that needs no API key. Only the SHA-256 of its secret is stored, as hexadecimal."""

    __tablename__ = "download_links"

    secret_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    checkpoint_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
