"""Places in lists that go by time: the cursor of a page names the last row before it, which may be gone by then."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from sqlalchemy import ColumnElement, or_

from contracts.errors import InvalidRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a row in a list: its time, and its id among those of one time."""

    at: datetime
    id: str

    @classmethod
    def of(cls, row: Any) -> Self:
        """Return the place of a row that was made at ``created_at``."""
        return cls(row.created_at, row.id)

    @classmethod
    def parse(cls, cursor: str) -> Self:
        """Return the place that a cursor names. Raises ``InvalidRequest``."""
        at, _, id = cursor.partition("-")
        if not (at.isascii() and at.isdigit() and len(at) <= 17 and id):
            raise wrong_cursor()
        return cls(_EPOCH + int(at) * _MICROSECOND, id)

    @property
    def cursor(self) -> str:
        """Cursor of the page that begins behind this place."""
        return f"{(self.at - _EPOCH) // _MICROSECOND}-{self.id}"


def wrong_cursor() -> InvalidRequest:
    """Return the error for a cursor that no answer of the list has given."""
    return InvalidRequest("cursor: send the `next_cursor` of an earlier answer, as it is")


def behind(at: Any, id: Any, place: Place | None) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions on rows behind a place in a list of the newest first, and of ascending ids within one time."""
    if place is None:
        return ()
    # In two conditions: the first one begins the walk over an index of times.
    return (at <= place.at, or_(at < place.at, id > place.id))
