"""Cursors of lists that go by several columns: places between rows, which stay where they are while rows come and go."""

import base64
import json

from contracts.errors import InvalidRequest


def cursor_of(*values: str) -> str:
    """Return the cursor of the place behind the row with these values of the columns that order the list."""
    place = json.dumps(values, ensure_ascii=True, separators=(",", ":"))
    return base64.urlsafe_b64encode(place.encode()).decode()


def values_of(cursor: str, count: int) -> list[str]:
    """Return the values of the row before the place. Raises ``InvalidRequest``."""
    try:
        values = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
    except (ValueError, RecursionError) as error:
        raise wrong_cursor() from error
    if not isinstance(values, list) or len(values) != count or not all(is_text(value) for value in values):
        raise wrong_cursor()
    return values


def wrong_cursor() -> InvalidRequest:
    """Return the error for a cursor that no answer of the list has given."""
    return InvalidRequest("after: send the `next` of an earlier answer, as it is")


def is_text(value: object) -> bool:
    """Return whether a value of a cursor is text that databases take: no NUL, no half of a surrogate pair."""
    return isinstance(value, str) and "\0" not in value and value.encode(errors="replace").decode() == value
