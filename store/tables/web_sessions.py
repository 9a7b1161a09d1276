"""Tables of the dashboard: sessions of browsers, and one-time codes that begin them."""

from datetime import datetime

from sqlalchemy import ForeignKey, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class WebSession(Base):
    """A browser's session, begun with a key and with the key's rights. Only its secret's SHA-256 is stored.

    ``seen_at`` is the minute of its last use.
    """

    __tablename__ = "web_sessions"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    token_hash: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    key_id: Mapped[int] = mapped_column(ForeignKey("api_keys.id"), index=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    expires_at: Mapped[datetime] = mapped_column(index=True)
    address: Mapped[str | None] = mapped_column(String(64))
    agent: Mapped[str] = mapped_column(String(200), default="")


class LoginCode(Base):
    """A one-time code that begins a web session with a key. Only its SHA-256 is stored."""

    __tablename__ = "login_codes"

    code_hash: Mapped[bytes] = mapped_column(LargeBinary(32), primary_key=True)
    key_id: Mapped[int] = mapped_column(ForeignKey("api_keys.id"), index=True)
    expires_at: Mapped[datetime] = mapped_column(index=True)
