"""Tables of browsers that are logged in by an operator's key, and of one-time codes that log them in."""

from datetime import datetime

from sqlalchemy import ForeignKey, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class OperatorSession(Base):
    """A browser that is logged in by an operator's key. Only the SHA-256 of its cookie's secret is stored.

    ``seen_at`` is the minute of its last request that was noted.
    """

    __tablename__ = "operator_sessions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    secret_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    operator_key_id: Mapped[int] = mapped_column(ForeignKey("operator_keys.id"), index=True)
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
    address: Mapped[str | None] = mapped_column(String(64))
    agent: Mapped[str] = mapped_column(String(200))


class OperatorCode(Base):
    """A one-time code that begins a session of an operator's browser. Only its SHA-256 is stored."""

    __tablename__ = "operator_codes"

    code_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    operator_key_id: Mapped[int] = mapped_column(ForeignKey("operator_keys.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)
