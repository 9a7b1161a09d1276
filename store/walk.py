"""Walks over a table in order of a time and an id: each step begins after the row at which the last one ended."""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, String, literal, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from store.tables.base import UtcDateTime


@dataclass(frozen=True, slots=True)
class Place:
    """The row at which a step of a walk ended."""

    at: datetime
    id: str

    def __str__(self) -> str:
        """Return the place as text, for ``parse``."""
        return f"{self.at.isoformat()} {self.id}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Return the place that ``text`` names. Raises ``ValueError``."""
        at, _, row_id = text.partition(" ")
        return cls(datetime.fromisoformat(at), row_id)

    def precedes(
        self,
        at: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None],
        row_id: InstrumentedAttribute[str],
    ) -> ColumnElement[bool]:
        """Return the condition that a row, with these columns, comes after the place."""
        return tuple_(at, row_id) > tuple_(literal(self.at, UtcDateTime()), literal(self.id, String()))
