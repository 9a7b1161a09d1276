"""Tables of what outlives checkpoints' rows: their folders, what still needs those, and the addresses that were deleted."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class CheckpointHold(Base):
    """The checkpoint that a ``load_weights`` loads, also when it runs or is replayed later.

    The checkpoint's folder stays until a snapshot of ``run_id`` covers the operation, ``seq_id`` of the run's lane. What the
    checkpoint's name stands for by then makes no difference.
    """

    __tablename__ = "checkpoint_holds"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    run_id: Mapped[str] = mapped_column(String(100))
    seq_id: Mapped[int] = mapped_column(BigInteger)
    checkpoint_id: Mapped[str] = mapped_column(String(32), index=True)


class DiscardedFolder(Base):
    """A folder of a deleted checkpoint, relative to the data folder. It goes once nothing reads it any more."""

    __tablename__ = "discarded_folders"

    directory: Mapped[str] = mapped_column(String(500), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    checkpoint_id: Mapped[str] = mapped_column(String(32))
    discarded_at: Mapped[datetime] = mapped_column(index=True)


class DeletedCheckpoint(Base):
    """An address whose checkpoint its tenant has deleted. By it a repeat of the deletion is known, whose answer was lost."""

    __tablename__ = "deleted_checkpoints"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    run_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    segment: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    deleted_at: Mapped[datetime] = mapped_column(index=True)
