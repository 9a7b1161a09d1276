"""Tables of clients' sessions and samplers."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index

_IS_OPEN = text("ended_at IS NULL")


class Session(Base):
    """A session of one SDK client, opened with the API key ``key_id``. ``project`` None: the tenant's default project.

    Following a sample moves ``last_seen_at``, too; ``heartbeat_at`` is the last heartbeat, None if there was none.
    """

    __tablename__ = "sessions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any] | None]
    sdk_version: Mapped[str] = mapped_column(String(64), default="")
    project: Mapped[str | None] = mapped_column(ForeignKey("projects.id"))
    key_id: Mapped[int | None]
    project_id: Mapped[str | None] = mapped_column(String(200))
    """Text written by processes of an older version only, which may still run during an upgrade."""
    display_name: Mapped[str | None] = mapped_column(String(200))
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    end_reason: Mapped[str | None] = mapped_column(String(32))
    end_detail: Mapped[str | None] = mapped_column(Text)

    __table_args__ = (
        Index("ix_sessions_listed", "tenant_id", "created_at", "id"),
        partial_index("ix_sessions_project", "project", "created_at", where=text("project IS NOT NULL")),
        partial_index("ix_sessions_open", "tenant_id", where=_IS_OPEN),
        partial_index("ix_sessions_silent", "last_seen_at", where=_IS_OPEN),
        partial_index("ix_sessions_lost", "tenant_id", "ended_at", "id", where=text("end_reason = 'timed_out'")),
        partial_index("ix_sessions_ended", "ended_at", "id", where=text("ended_at IS NOT NULL")),
    )


class Sampler(Base):
    """A sampling session, which samples from one of three things.

    - Pinned: from ``checkpoint_id``.
    - Live: from the newest version of ``live_run_id``, which ``checkpoint_id`` then names.
    - Neither set: from the bare base.

    ``publications`` counts the versions that a live sampler has followed. A live sampler's sample that falls more than
    ``max_version_lag`` publications behind (None: no limit) is handled as ``on_stale`` says. ``swap_policy`` says what a
    publication does to its samples in flight; None: as the service's setting says. ``copies`` counts the copies of its
    client that have asked for a number.
    """

    __tablename__ = "samplers"

    id: Mapped[str] = mapped_column(String(100), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    sampling_session_seq_id: Mapped[int] = mapped_column(BigInteger)
    base_model: Mapped[str] = mapped_column(String(500))
    model_path: Mapped[str | None] = mapped_column(String(500))
    checkpoint_id: Mapped[str | None] = mapped_column(String(32), index=True)
    live_run_id: Mapped[str | None] = mapped_column(String(100), index=True)
    created_at: Mapped[datetime]
    publications: Mapped[int] = mapped_column(BigInteger, server_default="0")
    max_version_lag: Mapped[int | None]
    on_stale: Mapped[str | None] = mapped_column(String(8))
    swap_policy: Mapped[str | None] = mapped_column(String(8))
    copies: Mapped[int] = mapped_column(BigInteger, server_default="0")

    __table_args__ = (UniqueConstraint("session_id", "sampling_session_seq_id"),)
