"""Tables of tenants: who they are, and their keys. Keys of the service's own operators."""

from datetime import datetime

from sqlalchemy import JSON, Float, ForeignKey, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from contracts.service_class import ServiceClass
from store.tables.base import Base, partial_index


class Tenant(Base):
    """An owner of sessions, runs and checkpoints.

    ``share`` is its weight against other tenants in the scheduler, before the factor of its ``service_class``. ``limits`` has
    the values of its own, by name (``tenants.limits``); None is the default of every limit. The accepted work of a tenant
    with ``suspended_at`` waits; ``suspend_mode`` says what else is refused (``tenants.suspensions``), None nothing. After a
    block its clients are answered again since ``answered_since``, None if it was never blocked.

    What a tenant with ``delete_at`` has is removed from then on; ``deleted_at`` is when nothing was left (``tenants.deletion``).
    ``prior_mode`` and ``prior_reason`` are of the suspension that it had when it was marked; a restored tenant has them again.
    """

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    share: Mapped[float] = mapped_column(Float, default=1.0)
    service_class: Mapped[str] = mapped_column(
        String(16), default=ServiceClass.STANDARD, server_default=ServiceClass.STANDARD
    )
    limits: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[datetime]
    suspended_at: Mapped[datetime | None]
    suspend_reason: Mapped[str | None] = mapped_column(String(500))
    suspend_mode: Mapped[str | None] = mapped_column(String(16))
    answered_since: Mapped[datetime | None]
    prior_mode: Mapped[str | None] = mapped_column(String(16))
    prior_reason: Mapped[str | None] = mapped_column(String(500))
    delete_at: Mapped[datetime | None]
    deleted_at: Mapped[datetime | None]

    __table_args__ = (
        partial_index("ix_tenants_suspended", "id", where=text("suspended_at IS NOT NULL")),
        partial_index("ix_tenants_delete_at", "delete_at", where=text("delete_at IS NOT NULL AND deleted_at IS NULL")),
    )


class ApiKey(Base):
    """An API key. Only the secret's SHA-256 is stored. ``prefix`` finds the row and names the key to people.

    ``role`` and ``scopes`` say what the key may do, the other bounds where and until when (``tenants.rights``). None is no
    bound.

    - ``last_used_at``: minute of the last use that was noted; None: never used.
    - ``made_by``: request that made the key, so that a repeat of it makes no other.
    - ``limits``: rates of its own, by name (``tenants.rate_lines``); None: none.
    - ``budget_key``: key of whose budgets and rates this one takes, the first of those whose place it took; None: its own.
    - ``operator``: first part of the operator's key that looks at the tenant with this one; None for a tenant's own key.
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
    expires_at: Mapped[datetime | None] = mapped_column(index=True)
    base_models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    max_rank: Mapped[int | None]
    networks: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    limits: Mapped[dict[str, int] | None] = mapped_column(JSON(none_as_null=True))
    last_used_at: Mapped[datetime | None]
    made_by: Mapped[str | None] = mapped_column(String(64))
    operator: Mapped[str | None] = mapped_column(String(32))
    budget_key: Mapped[int | None]

    __table_args__ = (Index("ix_api_keys_made_by", "made_by", unique=True),)


class OperatorKey(Base):
    """A key of the service's own operators, who belong to no tenant. Only the secret's SHA-256 is stored.

    ``last_used_at`` is the minute of the last use; None: never used.
    """

    __tablename__ = "operator_keys"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    prefix: Mapped[str] = mapped_column(String(32), unique=True)
    secret_hash: Mapped[bytes]
    note: Mapped[str] = mapped_column(String(200), default="")
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
