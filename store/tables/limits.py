"""Tables of rates and budgets: what is charged of each, in the transaction of what is charged for."""

from datetime import datetime

from sqlalchemy import BigInteger, Double, ForeignKey, Index, Integer, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class Rate(Base):
    """State of a tenant's rate of one meter (``tenants.rates``).

    - ``tat``: theoretical arrival time, in seconds since 1970: all that was charged is worked off then.
    - ``per_second``: tokens worked off in a second; None: the tenant has no rate any more.
    - ``burst``: tokens that may run at once.
    - ``charged``: tokens ever charged; an operation's place in this line is its ``rate_mark``.
    - ``returned``: tokens of them that were given back when operations ended.
    """

    __tablename__ = "rates"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    meter: Mapped[str] = mapped_column(String(16), primary_key=True)
    tat: Mapped[float] = mapped_column(Double)
    per_second: Mapped[float | None] = mapped_column(Double)
    burst: Mapped[int] = mapped_column(BigInteger)
    charged: Mapped[int] = mapped_column(BigInteger)
    returned: Mapped[int] = mapped_column(BigInteger)


class RateLineRow(Base):
    """State of the rate of a key or a project for one meter (``tenants.rate_lines``). Columns as of ``Rate``.

    - ``scope``: ``key`` or ``project``, of which ``scope_id`` is the id.
    """

    __tablename__ = "rate_lines"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    scope: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[str] = mapped_column(String(64))
    meter: Mapped[str] = mapped_column(String(16))
    tat: Mapped[float] = mapped_column(Double)
    per_second: Mapped[float | None] = mapped_column(Double)
    burst: Mapped[int] = mapped_column(BigInteger)
    charged: Mapped[int] = mapped_column(BigInteger)
    returned: Mapped[int] = mapped_column(BigInteger)

    # The number of a line that is gone names no other one.
    __table_args__ = (UniqueConstraint("tenant_id", "scope", "scope_id", "meter"), {"sqlite_autoincrement": True})


class RatePlace(Base):
    """Place of an operation in the line of a key's or a project's rate, pruned with the operation's result.

    ``mark``: as ``rate_mark`` of its tenant's line. ``cost``: tokens with which it was charged.
    """

    __tablename__ = "rate_places"

    operation_id: Mapped[str] = mapped_column(String(36), primary_key=True)
    line_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    mark: Mapped[int] = mapped_column(BigInteger)
    cost: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = (Index("ix_rate_places_line_id_mark", "line_id", "mark"),)


class Budget(Base):
    """Budget of a tenant, of one of its keys or projects, and how much of it is spent (``tenants.budgets``).

    - ``scope``: ``tenant``, or ``key`` or ``project``, of which ``scope_id`` is the id.
    - ``period``: ``day``, ``month`` or ``total``.
    - ``meter``: ``tokens``, or the currency of which ``amount`` and ``spent`` are millionths.
    - ``rest``: part of a unit of ``spent`` that is spent beyond it, in 10^-10. Costs have that many places.
    - ``unpriced``: tokens that had no price, so nothing was spent for them.
    - ``resets_at``: end of the period in which ``spent`` was; None for ``total``.
    """

    __tablename__ = "budgets"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    scope: Mapped[str] = mapped_column(String(16), primary_key=True)
    scope_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    period: Mapped[str] = mapped_column(String(16), primary_key=True)
    meter: Mapped[str] = mapped_column(String(16), primary_key=True)
    amount: Mapped[int] = mapped_column(BigInteger)
    spent: Mapped[int] = mapped_column(BigInteger)
    rest: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    unpriced: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    resets_at: Mapped[datetime | None]


class BudgetAlert(Base):
    """A budget that has crossed ``percent`` of its amount, once in the period that ends at ``period_end``.

    ``period_end`` of a ``total`` budget is empty, else an ISO time.
    """

    __tablename__ = "budget_alerts"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    scope: Mapped[str] = mapped_column(String(16), primary_key=True)
    scope_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    period: Mapped[str] = mapped_column(String(16), primary_key=True)
    meter: Mapped[str] = mapped_column(String(16), primary_key=True)
    period_end: Mapped[str] = mapped_column(String(32), primary_key=True)
    percent: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    amount: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(index=True)
