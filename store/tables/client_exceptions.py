"""Table of exceptions that ended clients' scripts."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class ClientException(Base):
    """An exception of a session's script. ``event_id`` is the SDK's, ``at`` the time when it was told."""

    __tablename__ = "client_exceptions"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    event_id: Mapped[str] = mapped_column(String(64))
    error_type: Mapped[str] = mapped_column(String(200))
    message: Mapped[str] = mapped_column(Text)
    traceback: Mapped[str] = mapped_column(Text)
    at: Mapped[datetime]

    __table_args__ = (
        UniqueConstraint("session_id", "event_id"),
        Index("ix_client_exceptions_tenant_id_id", "tenant_id", "id"),
    )
