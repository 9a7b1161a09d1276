"""Tables of the service's processes: those that are there, and those that have died."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Double, String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class ProcessKind(StrEnum):
    """Kind of work that a process does: for its base model, or, as an API process, for clients of all base models."""

    TRAINER = "trainer"
    POOL = "pool"
    API = "api"


class PoolState(StrEnum):
    """State of a sampling process: whether it takes samples.

    - ``working``: some replica takes work.
    - ``drained``: replicas are alive, and an operator has drained them all.
    - ``no_replica``: no replica answers.
    """

    WORKING = "working"
    DRAINED = "drained"
    NO_REPLICA = "no_replica"


class ReplicaCondition(StrEnum):
    """Condition of a replica, as its sampling process tells it.

    - ``works``: it takes samples. ``draining``: it takes none and finishes its own. ``asleep``: its memory is free.
    - ``cannot_sleep``: it was told to sleep and never can: it takes no samples, and its memory is in use.
    - ``down``: it does not answer, or could not be started.
    """

    WORKS = "works"
    DRAINING = "draining"
    ASLEEP = "asleep"
    CANNOT_SLEEP = "cannot_sleep"
    DOWN = "down"


class WorkerProcess(Base):
    """A process that trains or samples ``base_model``, or an API process, whose ``base_model`` is "".

    Its lease ends at ``expires_at``, by the database's clock.

    A trainer with ``drained_at`` gives up its runs and gets no new ones. One with ``ending_at`` ends in order and takes none.
    ``pool_state`` is a sampling process's ``PoolState``. ``capacity``: tokens of a trainer's pass, or samples that a sampling
    process holds at once; None in rows of a version before. ``release``: version of weft that the process runs.

    A trainer tells ``resident_runs``, the runs whose adapters are in its memory, and figures of its last pass: tokens without
    padding, positions with it. They are None until it has told. A sampling process tells its ``replicas``.
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
    ending_at: Mapped[datetime | None]
    pool_state: Mapped[str] = mapped_column(String(16), default=PoolState.WORKING, server_default=PoolState.WORKING)
    capacity: Mapped[int | None] = mapped_column(BigInteger)
    resident_runs: Mapped[list[str] | None]
    replicas: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON)
    release: Mapped[str | None] = mapped_column(String(64))
    pass_ended_at: Mapped[datetime | None]
    pass_seconds: Mapped[float | None] = mapped_column(Double)
    pass_tokens: Mapped[int | None] = mapped_column(BigInteger)
    pass_positions: Mapped[int | None] = mapped_column(BigInteger)
    pass_sequences: Mapped[int | None]
    pass_adapters: Mapped[int | None]
    pass_tenants: Mapped[int | None]


class EndedProcess(Base):
    """A process that died: its lease ended, or its supervisor saw it exit. One that ends in order leaves no row.

    ``runs`` and ``samples``: runs that a trainer leased, and samples that a sampling process drew, which others took over.
    ``drained_at`` and ``drain_reason``: the drain of a trainer, which has it again should it live after all.
    """

    __tablename__ = "ended_processes"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    base_model: Mapped[str] = mapped_column(String(500))
    host: Mapped[str] = mapped_column(String(200))
    pid: Mapped[int]
    release: Mapped[str | None] = mapped_column(String(64))
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime] = mapped_column(index=True)
    runs: Mapped[int]
    samples: Mapped[int]
    drained_at: Mapped[datetime | None]
    drain_reason: Mapped[str | None] = mapped_column(String(500))
