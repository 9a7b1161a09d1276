"""Table of what happened to runs."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class RunEvent(Base):
    """An event in a run's life with its trainers, written in the transaction that it is about.

    - ``kind``: see ``tenants.run_history.RunEventKind``.
    - ``trainer``: trainer that the event happened to; ``lease_token``: the run's fencing token after it.
    """

    __tablename__ = "run_events"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(String(100))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(String(16))
    trainer: Mapped[str | None] = mapped_column(String(64))
    lease_token: Mapped[int] = mapped_column(BigInteger)
    detail: Mapped[str | None] = mapped_column(String(500))
    at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index("ix_run_events_run_id_id", "run_id", "id"),)
