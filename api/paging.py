"""Paging of lists: Tinker's by limit and offset, weft's own by limit and cursor.

Values out of range are brought into range instead of refused.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel

from api.wire.request_model import NO_NUL
from tenants.list_places import Place

Row = TypeVar("Row")

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
"""Most rows of one answer."""
MAX_OFFSET = 2**31 - 1
"""Largest offset: int32, which the integers of every database hold."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Range of rows: ``limit`` 0 to ``MAX_LIMIT``, ``offset`` 0 to ``MAX_OFFSET``, behind the place ``after``."""

    limit: int
    offset: int
    after: Place | None = None


class Cursor(BaseModel):
    """Position of a page in the whole list."""

    offset: int
    limit: int
    total_count: int


async def _page(limit: Annotated[int, Query()] = DEFAULT_LIMIT, offset: Annotated[int, Query()] = 0) -> PageRequest:
    return PageRequest(limit=min(max(limit, 0), MAX_LIMIT), offset=min(max(offset, 0), MAX_OFFSET))


Page = Annotated[PageRequest, Depends(_page)]


async def _cursor_page(
    limit: Annotated[int, Query()] = DEFAULT_LIMIT,
    cursor: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
    offset: Annotated[int, Query()] = 0,
) -> PageRequest:
    after = None if cursor is None else Place.parse(cursor)
    return replace(await _page(limit, offset), after=after)


CursorPage = Annotated[PageRequest, Depends(_cursor_page)]
"""Page of a list of weft's own. ``offset`` is for clients that know no cursor: rows that come or go meanwhile shift its pages."""


def next_cursor(page: PageRequest, rows: Sequence[Any]) -> str | None:
    """Return the cursor of the page behind ``rows``, of which one more than the page holds was asked for; None at the end."""
    return Place.of(rows[page.limit - 1]).cursor if 0 < page.limit < len(rows) else None


class PagesAhead(Generic[Row]):
    """Rows of ``pages`` without the last one, which was asked for beyond ``limit``. ``next_cursor`` is known at their end."""

    def __init__(self, limit: int, pages: AsyncIterator[Sequence[Row]]) -> None:
        self.next_cursor: str | None = None
        self._left = limit
        self._pages = pages

    async def shown(self) -> AsyncIterator[Sequence[Row]]:
        """Iterate over the pages."""
        last: Row | None = None
        async for rows in self._pages:
            shown, has_more = rows[: self._left], len(rows) > self._left
            self._left -= len(shown)
            last = shown[-1] if shown else last
            if has_more and last is not None:
                self.next_cursor = Place.of(last).cursor
            yield shown


def cursor_of(page: PageRequest, total: int) -> Cursor:
    """Return the cursor of an answer that shows ``page`` of ``total`` rows."""
    return Cursor(offset=page.offset, limit=page.limit, total_count=total)
