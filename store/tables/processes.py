"""Table of worker processes."""

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Double, String
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
    process holds at once; None in rows of a version before. ``release``: version of weft that the process runs.

    A trainer tells ``resident_runs``, the runs whose adapters are in its memory, and figures of its last pass: tokens without
    padding, positions with it. They are None until it has told.
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
    release: Mapped[str | None] = mapped_column(String(64))
    pass_ended_at: Mapped[datetime | None]
    pass_seconds: Mapped[float | None] = mapped_column(Double)
    pass_tokens: Mapped[int | None] = mapped_column(BigInteger)
    pass_positions: Mapped[int | None] = mapped_column(BigInteger)
    pass_sequences: Mapped[int | None]
    pass_adapters: Mapped[int | None]
    pass_tenants: Mapped[int | None]
