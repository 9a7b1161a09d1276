"""Tables. The schema itself is Alembic's (``migrations/``); a test proves that both agree.

Every row has a tenant. Times are aware UTC. Hot rows (operations) and cold bytes (payloads, results) are apart.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    TextClause,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from contracts.ledger_records import OperationState


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC datetimes on every database (SQLite forgets the zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        """Refuse naive times, store UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("naive datetime")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, _dialect: Dialect) -> datetime | None:
        """Give UTC back."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Declarative base with a naming convention, so that constraints have the same names everywhere."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {
        datetime: UtcDateTime(),
        dict[str, Any]: JSON(),
        dict[str, str]: JSON(),
        list[str]: JSON(),
        bytes: LargeBinary(),
    }


class RunState(StrEnum):
    """Life of a run's adapter."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"


class Tenant(Base):
    """An owner of sessions, runs and checkpoints. ``share`` weighs it against others in the scheduler."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    share: Mapped[float] = mapped_column(Float, default=1.0)
    created_at: Mapped[datetime]


class ApiKey(Base):
    """An API key: only the SHA-256 of the secret is stored; ``prefix`` finds the row and names the key to people."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(32), unique=True)
    secret_hash: Mapped[bytes]
    note: Mapped[str] = mapped_column(String(200), default="")
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class Session(Base):
    """One SDK client's session."""

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

    ``next_seq_id`` is the seq_id of the operation that may run next; ``snapshot_seq_id`` is the last one covered by the
    durable snapshot in ``snapshot_dir`` (relative to the data folder), -1 before the first. ``trainer_id`` is the process
    that may write what the run's operations do; ``lease_token`` grows whenever it changes.
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
    """A saved version of an adapter: an immutable folder ``directory``, relative to the data folder.

    ``listed`` is false for the nameless versions behind ``save_weights_and_get_sampling_client``.
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
    """A sampling session. Pinned to ``checkpoint_id``, or follows ``live_run_id``, or samples the bare base.

    ``publications`` counts the versions that a live one has followed; its samples may fall ``max_version_lag`` of them
    behind (None: any number), or else ``on_stale`` says what becomes of them.
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


def _partial(name: str, *columns: str, where: TextClause) -> Index:
    """An index of the few rows that are looked for, however long the ledger grows."""
    return Index(name, *columns, sqlite_where=where, postgresql_where=where)


class Operation(Base):
    """The ledger's row. ``lane`` is the run or sampler that orders it; ``(lane, seq_id)`` is the idempotency key.

    ``position`` is the order of acceptance over the whole service; ``trace_id`` that of the request that brought it.
    ``taken_by`` is the process that works on a sample.
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
        _partial("ix_operations_pending_training", "base_model", "position", where=_IS_PENDING_TRAINING),
        _partial("ix_operations_pending_samples_of_base", "base_model", "position", where=_IS_PENDING_SAMPLE),
        _partial("ix_operations_pending_samples", "tenant_id", where=_IS_PENDING_SAMPLE),
        _partial("ix_operations_unpruned", "finished_at", where=_IS_UNPRUNED),
    )


class OperationPayload(Base):
    """What was asked: ``contracts.codec`` bytes. Kept until a snapshot covers the operation.

    ``kept_for_replay`` once the operation's result is pruned and the payload is still needed.
    """

    __tablename__ = "operation_payloads"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]
    kept_for_replay: Mapped[bool] = mapped_column(server_default=false())

    __table_args__ = (_partial("ix_operation_payloads_kept", "operation_id", where=_IS_KEPT),)


class OperationResult(Base):
    """What came out: ``contracts.codec`` bytes. Pruned after the grace time."""

    __tablename__ = "operation_results"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]


class AdapterGate(Base):
    """Whether samples of a run's adapter may run; ``run_id`` is ``pool:`` and the base's name for all of a base.

    ``mode`` is None while it is open, and then nothing but ``generation`` counts: it grows with every change. A gate whose
    ``expires_at`` has passed is open.
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
    """What operators want of one replica of a base model; without a row it works."""

    __tablename__ = "ordered_replicas"

    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    replica: Mapped[str] = mapped_column(String(200), primary_key=True)
    wanted: Mapped[str] = mapped_column(String(8))
    reason: Mapped[str | None] = mapped_column(String(500))
    since: Mapped[datetime]


class SampleInFlight(Base):
    """A sample that a replica works on now, on ``version`` (a checkpoint's id, None for the base) of ``run_id``."""

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
    """How a sample came about: ``contracts.sample_report`` bytes, pruned with the result."""

    __tablename__ = "sample_reports"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]


class WorkerProcess(Base):
    """A process that trains or samples ``base_model``. It is dead once ``expires_at``, in the database's time, has passed."""

    __tablename__ = "worker_processes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(500))
    host: Mapped[str] = mapped_column(String(200))
    pid: Mapped[int]
    started_at: Mapped[datetime]
    expires_at: Mapped[datetime]


class Placement(Base):
    """A run with work and without a trainer: the outbox of what is announced. ``announced_at``: last given to the broker."""

    __tablename__ = "placements"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    base_model: Mapped[str] = mapped_column(String(500), index=True)
    created_at: Mapped[datetime]
    announced_at: Mapped[datetime | None]


class VersionCommand(Base):
    """What the sampling process ``process_id`` shall do with a version: load it beside others, or forget it.

    ``done_at`` is None while it is asked; ``error_message`` says why it could not be done.
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
    """What a tenant did on ``day`` (ISO, UTC): operations that ended well, and tokens that they trained or sampled."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    operations: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)


class DownloadLink(Base):
    """Leave to read a checkpoint's files, for whoever has the secret: only its SHA-256 is stored, as hexadecimal."""

    __tablename__ = "download_links"

    secret_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    checkpoint_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
