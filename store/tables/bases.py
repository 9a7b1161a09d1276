"""Table of base models' weights."""

from datetime import datetime

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base


class BaseWeights(Base):
    """The weights that a served name stands for, by their fingerprint: those of its first use, or accepted later."""

    __tablename__ = "base_weights"

    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    accepted_at: Mapped[datetime]
