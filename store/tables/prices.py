"""Tables of prices: the service's, and those of single tenants."""

from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import Dialect, ForeignKey, Integer, Numeric, String, TypeDecorator, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import TypeEngine

from store.tables.base import Base

PRICE_DIGITS, PRICE_PLACES = 20, 10


class Amount(TypeDecorator[Decimal]):
    """Column type for exact amounts of money on every database. SQLite has no decimal numbers, so it keeps the text."""

    impl = Numeric(PRICE_DIGITS, PRICE_PLACES)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the column type of the database."""
        return dialect.type_descriptor(String(32) if dialect.name == "sqlite" else Numeric(PRICE_DIGITS, PRICE_PLACES))

    def process_bind_param(self, value: Decimal | None, dialect: Dialect) -> Decimal | str | None:
        """Return what the database's driver takes."""
        return str(value) if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Decimal | str | None, _dialect: Dialect) -> Decimal | None:
        """Return the amount."""
        return None if value is None else Decimal(value)


class _Priced:
    """Columns of a price. ``base_model`` is empty for a price of every base that has none of its own."""

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    base_model: Mapped[str] = mapped_column(String(500))
    meter: Mapped[str] = mapped_column(String(32))
    amount: Mapped[Decimal] = mapped_column(Amount())
    currency: Mapped[str] = mapped_column(String(3))
    valid_from: Mapped[datetime]
    created_at: Mapped[datetime]


class Price(_Priced, Base):
    """Price of a meter of a base model from the hour ``valid_from`` on, until a later one. A row never changes."""

    __tablename__ = "prices"

    __table_args__ = (UniqueConstraint("base_model", "meter", "valid_from"),)


class TenantPrice(_Priced, Base):
    """A tenant's own price, which goes before every price of the service. A row never changes."""

    __tablename__ = "tenant_prices"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))

    __table_args__ = (UniqueConstraint("tenant_id", "base_model", "meter", "valid_from"),)
