"""Table of jobs on weights."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from contracts.weight_jobs import JobState
from store.tables.base import Base, partial_index

IS_UNFINISHED = text("state IN ('pending', 'running')")


class WeightJob(Base):
    """A job on weights that takes minutes, such as a merge. Its row is the truth; messages only tell workers to look.

    - ``body``: what to do, as msgpack of the kind's record.
    - ``checkpoint_id``: checkpoint that the newest attempt makes. The next one removes what it has left.
    - ``taken_by``, ``taken_until``: attempt that works on the job, and the end of its lease. ``attempts`` counts them.
    - ``idempotency_key``: the tenant's own name for the request, by which a repeat of it is known.
    - ``cancelled_at``: when its tenant asked for its end.
    - ``session_id``: session of the run that the job makes or adds to, whose project the job is in. None in rows of a
      version before, which are in the default project.
    """

    __tablename__ = "weight_jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(500))
    state: Mapped[str] = mapped_column(String(16), default=JobState.PENDING)
    body: Mapped[bytes]
    checkpoint_id: Mapped[str] = mapped_column(String(32))
    done_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    total_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    attempts: Mapped[int] = mapped_column(default=0)
    taken_by: Mapped[str | None] = mapped_column(String(32))
    taken_until: Mapped[datetime | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]
    result_path: Mapped[str | None] = mapped_column(String(500))
    error_code: Mapped[str | None] = mapped_column(String(64))
    error_message: Mapped[str | None] = mapped_column(Text)
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id"))

    __table_args__ = (
        Index("ix_weight_jobs_tenant_id_created_at", "tenant_id", "created_at"),
        Index("ix_weight_jobs_idempotency_key", "tenant_id", "idempotency_key", unique=True),
        Index("ix_weight_jobs_session_id", "session_id"),
        partial_index("ix_weight_jobs_unfinished", "created_at", "id", where=IS_UNFINISHED),
        partial_index("ix_weight_jobs_finished", "finished_at", where=text("finished_at IS NOT NULL")),
    )
