"""Tables of the sampling pools: gates, replicas, samples in flight and their reports."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, false, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index


class AdapterGate(Base):
    """A gate before the samples of one run's adapter, or of a whole base model (``run_id`` is then ``pool:NAME``).

    The gate is open while ``mode`` is None, or once ``expires_at`` has passed. ``generation`` grows with every change,
    ``cache_clears`` with every pause that clears the cache; the other columns mean nothing while the gate is open.
    """

    __tablename__ = "adapter_gates"

    run_id: Mapped[str] = mapped_column(String(520), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id"))
    base_model: Mapped[str] = mapped_column(String(500), index=True)
    generation: Mapped[int] = mapped_column(BigInteger, default=0)
    cache_clears: Mapped[int] = mapped_column(BigInteger, server_default="0")
    mode: Mapped[str | None] = mapped_column(String(8))
    reason: Mapped[str | None] = mapped_column(String(500))
    since: Mapped[datetime]
    expires_at: Mapped[datetime | None]

    __table_args__ = (partial_index("ix_adapter_gates_closed", "expires_at", where=text("mode IS NOT NULL")),)


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


class SampleProgress(Base):
    """An unfinished sample's tokens as ``contracts.sample_progress`` bytes, from a sampling process that has ended.

    ``is_stale``: that process died with further tokens, or with all of them (``body`` is empty). ``drawn`` and ``cached``: the
    drawn tokens and the cached ones of the prompt. Both are None in rows of a version before, and where ``body`` is empty.
    """

    __tablename__ = "sample_progress"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    body: Mapped[bytes]
    is_stale: Mapped[bool] = mapped_column(server_default=false())
    drawn: Mapped[int | None] = mapped_column(BigInteger)
    cached: Mapped[int | None] = mapped_column(BigInteger)


class SampleRecord(Base):
    """A finished sample as ``contracts.provenance`` bytes, for training that names its sequences.

    Not used once ``session_id`` has ended. No foreign key: sessions are forgotten without waiting for their records.
    ``size_bytes`` is what the record counts for. ``start_byte`` is its place in all that the tenant has recorded, which grows
    with each record: what is too far behind the newest one is forgotten. Both are None in rows of a version before.
    """

    __tablename__ = "sample_records"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    session_id: Mapped[str] = mapped_column(String(64), index=True)
    body: Mapped[bytes]
    start_byte: Mapped[int | None] = mapped_column(BigInteger)
    size_bytes: Mapped[int | None] = mapped_column(BigInteger)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index("ix_sample_records_bytes", "tenant_id", "start_byte", "size_bytes"),)


class VersionCommand(Base):
    """A command to the sampling process ``process_id`` to load or to forget a version.

    ``done_at`` is None until the command is carried out. ``error_code`` and ``error_message`` say why it failed; rows of a
    version before have no code.
    """

    __tablename__ = "version_orders"

    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    process_id: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(16))
    run_id: Mapped[str | None] = mapped_column(String(100))
    version: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[datetime]
    done_at: Mapped[datetime | None]
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
