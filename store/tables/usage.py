"""Tables of tenants' usage: by hour with all that it can be told apart by, and by day."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class UsageHour(Base):
    """Usage of a tenant within the hour that begins at ``hour``, added up when its operations are pruned.

    - ``run_id``: empty for samples. ``key_id``: 0 where no key is known.
    - ``project``: of the session when that was forgotten; until then the session's own is told.
    - ``operations``: successful ones. ``failed``: the others.
    - ``train_tokens``: tokens of ``forward`` and ``forward_backward``.
    - ``prompt_tokens``: tokens of prompts, once for each request; ``cached_prompt_tokens`` of them came from a cache.
    """

    __tablename__ = "usage_hours"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    run_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    key_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    project: Mapped[str | None] = mapped_column(String(64))
    operations: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    train_tokens: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    sampled_tokens: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_usage_hours_session_id", "session_id"), Index("ix_usage_hours_hour", "hour"))


class StorageHour(Base):
    """Bytes of a tenant's checkpoints, and their number, in the hour that begins at ``hour``.

    ``project`` is that of their sessions at the reading.
    """

    __tablename__ = "storage_hours"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(primary_key=True, index=True)
    project: Mapped[str] = mapped_column(String(64), primary_key=True)
    nbytes: Mapped[int] = mapped_column(BigInteger)
    checkpoints: Mapped[int] = mapped_column(BigInteger)


class UsageDay(Base):
    """A tenant's usage on ``day`` (ISO, UTC): successful operations, and the tokens that were trained or sampled."""

    __tablename__ = "usage_days"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True, index=True)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    operations: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
