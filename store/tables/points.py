"""Tables of runs' curves: a point for each optimizer step, and metrics that users add."""

from datetime import datetime

from sqlalchemy import BigInteger, Float, ForeignKey, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class RunPoint(Base):
    """Optimizer step ``step`` of a run, the first being 1, summed over the ``forward_backward`` before it.

    - ``loss_weight``: what ``loss_sum`` is divided by for the mean loss, of the kind ``loss_per``.
    - ``loss_sum``: None once a summand was not finite, or the sum is beyond all bounds.
    - ``loss_fns``: names of the passes' loss functions with commas between, each once, in the order in which they came.
    - ``adapter_step``: steps that the adapter itself counts; goes back where the run loads an older state.
    - ``at``: end of the step; None while its gradient is gathered.
    """

    __tablename__ = "run_points"

    run_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    at: Mapped[datetime | None]
    loss_sum: Mapped[float | None] = mapped_column(Float(53))
    loss_weight: Mapped[float] = mapped_column(Float(53))
    loss_per: Mapped[str] = mapped_column(String(16))
    loss_fns: Mapped[str] = mapped_column(String(128), server_default=text("''"))
    tokens: Mapped[int] = mapped_column(BigInteger)
    sampling_kl_sum: Mapped[float | None] = mapped_column(Float(53))
    sampled_tokens: Mapped[int] = mapped_column(BigInteger)
    learning_rate: Mapped[float | None] = mapped_column(Float(53))
    grad_norm: Mapped[float | None] = mapped_column(Float(53))
    adapter_step: Mapped[int | None] = mapped_column(BigInteger)


class RunMetric(Base):
    """A user's own metric of a run, such as a reward. ``value`` None: a number that was not finite."""

    __tablename__ = "run_metrics"

    run_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    value: Mapped[float | None] = mapped_column(Float(53))
    at: Mapped[datetime]
