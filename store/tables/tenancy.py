"""Tables of tenants: who they are, and their keys."""

from datetime import datetime

from sqlalchemy import JSON, Float, ForeignKey, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index


class Tenant(Base):
    """An owner of sessions, runs and checkpoints.

    ``share`` is its weight against other tenants in the scheduler. ``limits`` has the values of its own, by name
    (``tenants.limits``); None is the default of every limit. The accepted work of a tenant with ``suspended_at`` waits;
    ``suspend_mode`` says what else is refused (``tenants.suspensions``), None nothing.
    """

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    share: Mapped[float] = mapped_column(Float, default=1.0)
    limits: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime]
    suspended_at: Mapped[datetime | None]
    suspend_reason: Mapped[str | None] = mapped_column(String(500))
    suspend_mode: Mapped[str | None] = mapped_column(String(16))

    __table_args__ = (partial_index("ix_tenants_suspended", "id", where=text("suspended_at IS NOT NULL")),)


class ApiKey(Base):
    """An API key. Only the secret's SHA-256 is stored. ``prefix`` finds the row and names the key to people.

    ``role`` and ``scopes`` say what the key may do, the other bounds where and until when (``tenants.rights``). None is no
    bound.

    - ``last_used_at``: minute of the last use that was noted; None: never used.
    - ``made_by``: request that made the key, so that a repeat of it makes no other.
    """

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(32), unique=True)
    secret_hash: Mapped[bytes]
    note: Mapped[str] = mapped_column(String(200), default="")
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None] = mapped_column(index=True)
    role: Mapped[str] = mapped_column(String(16), default="member", server_default="member")
    scopes: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    projects: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    expires_at: Mapped[datetime | None]
    base_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    max_rank: Mapped[int | None]
    networks: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    last_used_at: Mapped[datetime | None]
    made_by: Mapped[str | None] = mapped_column(String(64))

    __table_args__ = (Index("ix_api_keys_made_by", "made_by", unique=True),)
