"""Cursors of usage: places between its lines, which stay where they are while lines come and go."""

import base64
import json
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from contracts.errors import InvalidRequest
from tenants.metered_operations import SUMS
from tenants.text_cursors import is_text
from tenants.usage_hours import Dimension, UsageLine, key_of

_LARGEST_KEY = 2**31 - 1
"""Largest number that the column of keys holds. PostgreSQL's driver takes no larger one."""


def cursor_behind(line: UsageLine, by: Collection[Dimension]) -> str:
    """Return the cursor of the place behind ``line``, in usage that is told apart ``by`` those properties."""
    _, *values = key_of(line, by)
    place = json.dumps([line.start.isoformat(), *values], ensure_ascii=True, separators=(",", ":"))
    return base64.urlsafe_b64encode(place.encode()).decode()


def line_before(cursor: str, by: Collection[Dimension]) -> UsageLine:
    """Return the line before the place, without its sums. Raises ``InvalidRequest`` for a cursor of another question."""
    wrong = InvalidRequest("cursor: send the `next_cursor` of an earlier answer, as it is, with the same group_by")
    try:
        start, *values = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        begins = datetime.fromisoformat(start)
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong from error
    asked = [one for one in Dimension if one in by]
    if begins.utcoffset() != timedelta(0) or len(values) != len(asked):
        raise wrong
    told: dict[Dimension, Any] = dict(zip(asked, values, strict=True))
    if not all(_is_key(value) if one is Dimension.KEY else is_text(value) for one, value in told.items()):
        raise wrong
    values_of: dict[str, Any] = {one.value: told.get(one) for one in Dimension} | dict.fromkeys(SUMS, 0)
    return UsageLine(start=begins, **values_of)


def _is_key(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_KEY
