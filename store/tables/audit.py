"""Tables of the audit log: its entries, which only grow, and the digest of each day.

Triggers of the database refuse what changes them (``migrations/versions/0041_audit.py``).
"""

from datetime import date, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index

IS_OF_SAMPLING = text("action IN ('gate_pause', 'gate_resume', 'run_reload')")
"""Condition of a partial index. A query must repeat it word for word, or the databases do not use the index."""


class AuditEntry(Base):
    """One thing that was done, or refused, written in the transaction that did it.

    An entry outlives what it names, so nothing refers to another table.

    - ``day``: day whose digest covers the entry: that of ``at``, or the next one that was open still.
    - ``tenant_id``: tenant whose things it is about; None: the service's own.
    - ``actor``, ``key_id``, ``role``, ``door``, ``address``, ``trace_id``: see ``tenants.audit.Actor``.
    - ``action``: ``<resource>_<action>`` (``tenants.audit.Action``); ``resource_id``: what it was done to.
    - ``before``, ``after``: what has changed, bounded and without secrets.
    """

    __tablename__ = "audit_entries"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[datetime]
    day: Mapped[date]
    tenant_id: Mapped[str | None] = mapped_column(String(32))
    actor: Mapped[str] = mapped_column(String(200))
    key_id: Mapped[int | None]
    role: Mapped[str | None] = mapped_column(String(16))
    door: Mapped[str] = mapped_column(String(16))
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(String(32))
    resource_id: Mapped[str] = mapped_column(String(500))
    project: Mapped[str | None] = mapped_column(String(64))
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    address: Mapped[str | None] = mapped_column(String(64))
    trace_id: Mapped[str | None] = mapped_column(String(32))
    outcome: Mapped[str] = mapped_column(String(16))

    __table_args__ = (
        Index("ix_audit_entries_tenant_id_at_id", "tenant_id", "at", "id"),
        Index("ix_audit_entries_day_id", "day", "id"),
        Index("ix_audit_entries_at_id", "at", "id"),
        Index("ix_audit_entries_action_at_id", "action", "at", "id"),
        partial_index("ix_audit_entries_of_sampling", "resource_id", "id", where=IS_OF_SAMPLING),
        # No number is given twice, also after the newest entries went.
        {"sqlite_autoincrement": True},
    )


class AuditDigest(Base):
    """The digest of one day's entries and of the digest before. From its row on, the day takes no further entry.

    - ``next_day``: day that later entries of the day go to. ``digest``: None while it is computed.
    - ``expired_at``: time at which the retention of the day's entries was over; they may be deleted from then on.
    """

    __tablename__ = "audit_digests"

    day: Mapped[date] = mapped_column(primary_key=True)
    next_day: Mapped[date]
    closed_at: Mapped[datetime]
    entries: Mapped[int | None] = mapped_column(BigInteger)
    digest: Mapped[str | None] = mapped_column(String(64))
    expired_at: Mapped[datetime | None]
