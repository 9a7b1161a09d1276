"""Tables of tenants: who they are, their keys and their usage."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index


class Tenant(Base):
    """An owner of sessions, runs and checkpoints.

    ``share`` is its weight against other tenants in the scheduler. ``limits`` has the values of its own, by name
    (``tenants.limits``); None is the default of every limit. The accepted work of a tenant with ``suspended_at`` waits.
    """

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    share: Mapped[float] = mapped_column(Float, default=1.0)
    limits: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime]
    suspended_at: Mapped[datetime | None]
    suspend_reason: Mapped[str | None] = mapped_column(String(500))

    __table_args__ = (partial_index("ix_tenants_suspended", "id", where=text("suspended_at IS NOT NULL")),)


class ApiKey(Base):
    """An API key. Only the secret's SHA-256 is stored. ``prefix`` finds the row and names the key to people."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    prefix: Mapped[str] = mapped_column(String(32), unique=True)
    secret_hash: Mapped[bytes]
    note: Mapped[str] = mapped_column(String(200), default="")
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None] = mapped_column(index=True)


class UsageDay(Base):
    """A tenant's usage on ``day`` (ISO, UTC): successful operations, and the tokens that were trained or sampled."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True, index=True)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    operations: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
