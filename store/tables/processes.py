"""Table of worker processes."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class ProcessKind(StrEnum):
    """Kind of work that a process does for its base model."""

    TRAINER = "trainer"
    POOL = "pool"


class PoolState(StrEnum):
    """State of a sampling process: whether it takes samples.

    - ``working``: some replica takes work.
    - ``drained``: replicas are alive, and an operator has drained them all.
    - ``no_replica``: no replica answers.
    """

    WORKING = "working"
    DRAINED = "drained"
    NO_REPLICA = "no_replica"


class WorkerProcess(Base):
    """A process that trains or samples ``base_model``. Its lease ends at ``expires_at``, by the database's clock.

    A trainer with ``drained_at`` gives up its runs and gets no new ones.
    ``pool_state`` is a sampling process's ``PoolState``. ``capacity``: tokens of a trainer's pass, or samples that a sampling
    process holds at once; None in rows of a version before. ``resident_runs``: runs whose adapters are in a trainer's memory;
    None until it has told.
    """

    __tablename__ = "worker_processes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(500))
    host: Mapped[str] = mapped_column(String(200))
    pid: Mapped[int]
    started_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    drained_at: Mapped[datetime | None]
    drain_reason: Mapped[str | None] = mapped_column(String(500))
    pool_state: Mapped[str] = mapped_column(String(16), default=PoolState.WORKING, server_default=PoolState.WORKING)
    capacity: Mapped[int | None] = mapped_column(BigInteger)
    resident_runs: Mapped[list[str] | None]
