"""Tables of training runs, checkpoints and links to them."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Float, ForeignKey, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index

_HAS_SNAPSHOT = text("snapshot_dir IS NOT NULL")
_IS_READY = text("state = 'ready'")


class RunState(StrEnum):
    """State of a run's adapter."""

    CREATING = "creating"
    READY = "ready"
    FAILED = "failed"
    UNLOADED = "unloaded"


IS_OPEN = text("state IN ('creating', 'ready')")
IS_ENDED = text("state IN ('unloaded', 'failed')")
HAS_FORGOTTEN_SNAPSHOT = text("snapshot_dir IS NOT NULL AND state IN ('unloaded', 'failed')")
HAS_COVERED_PAYLOADS = text(
    "payloads_dropped_to < snapshot_seq_id OR (payloads_dropped_to < next_seq_id - 1 AND state IN ('unloaded', 'failed'))"
)
"""Conditions of partial indexes. A query must repeat one word for word, or the databases do not use the index."""


class Run(Base):
    """A training run: one adapter over one base model.

    - ``next_seq_id``: seq_id of the operation that may run next.
    - ``snapshot_seq_id``: last operation in the durable snapshot, -1 before the first.
    - ``snapshot_dir``: the snapshot's folder, relative to the data folder. ``snapshot_bytes``: the folder's size.
    - ``payloads_dropped_to``: last operation of the lane up to which no payload is kept.
    - ``trainer_id``: process that leases the run and alone may write its results.
    - ``lease_token``: fencing token; grows with every lease.
    - ``optimizer_steps``: steps that the run has taken.
    - ``weight``: weight of its passes among the runs of its tenant.
    - ``reloaded_version``, ``reloaded_at``: version of the last reload, and its time.
    - ``metric_names``, ``metric_rows``: names of its user's own metrics, and the number of their values.
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
    optimizer: Mapped[str] = mapped_column(String(16), server_default="adamw")
    state: Mapped[str] = mapped_column(String(16), default=RunState.CREATING)
    next_seq_id: Mapped[int] = mapped_column(BigInteger, default=0)
    snapshot_seq_id: Mapped[int] = mapped_column(BigInteger, default=-1)
    snapshot_dir: Mapped[str | None] = mapped_column(String(500))
    snapshot_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    payloads_dropped_to: Mapped[int] = mapped_column(BigInteger, server_default="-1")
    trainer_id: Mapped[str | None] = mapped_column(String(64), index=True)
    lease_token: Mapped[int] = mapped_column(BigInteger, server_default="0")
    optimizer_steps: Mapped[int] = mapped_column(BigInteger, server_default="0")
    weight: Mapped[float] = mapped_column(Float, default=1.0, server_default="1")
    reloaded_version: Mapped[str | None] = mapped_column(String(32))
    reloaded_at: Mapped[datetime | None]
    metric_names: Mapped[list[str] | None]
    metric_rows: Mapped[int] = mapped_column(BigInteger, server_default="0")
    created_at: Mapped[datetime]
    last_request_at: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint("session_id", "model_seq_id"),
        Index("ix_runs_tenant_id_created_at", "tenant_id", "created_at"),
        partial_index("ix_runs_snapshots", "tenant_id", "snapshot_bytes", where=_HAS_SNAPSHOT),
        partial_index("ix_runs_ready", "tenant_id", where=_IS_READY),
        partial_index("ix_runs_snapshot_dir", "snapshot_dir", where=_HAS_SNAPSHOT),
        partial_index("ix_runs_open", "session_id", where=IS_OPEN),
        partial_index("ix_runs_ended", "last_request_at", "id", where=IS_ENDED),
        partial_index("ix_runs_forgotten_snapshot", "id", where=HAS_FORGOTTEN_SNAPSHOT),
        partial_index("ix_runs_covered_payloads", "id", where=HAS_COVERED_PAYLOADS),
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
        Index("ix_checkpoints_tenant_id_size_bytes", "tenant_id", "size_bytes"),
        partial_index("ix_checkpoints_nameless", "created_at", "id", where=text("NOT listed")),
        partial_index("ix_checkpoints_nameless_of_run", "run_id", "created_at", where=text("NOT listed")),
    )


class DownloadLink(Base):
    """A link to a checkpoint's files that needs no API key. Only the SHA-256 of its secret is stored, as hexadecimal.

    ``key_id``: API key that the link was made with; the link ends with the key.
    """

    __tablename__ = "download_links"

    secret_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    checkpoint_id: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
    key_id: Mapped[int | None]


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
