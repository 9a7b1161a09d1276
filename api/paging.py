"""Paging of lists by limit and offset; values out of range are brought into range instead of refused."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query
from pydantic import BaseModel

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
"""Most rows of one answer."""
MAX_OFFSET = 2**31 - 1
"""Largest offset: int32, which the integers of every database hold."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Range of rows: ``limit`` 0 to ``MAX_LIMIT``, ``offset`` 0 to ``MAX_OFFSET``."""

    limit: int
    offset: int


class Cursor(BaseModel):
    """Position of a page in the whole list."""

    offset: int
    limit: int
    total_count: int


async def _page(limit: Annotated[int, Query()] = DEFAULT_LIMIT, offset: Annotated[int, Query()] = 0) -> PageRequest:
    return PageRequest(limit=min(max(limit, 0), MAX_LIMIT), offset=min(max(offset, 0), MAX_OFFSET))


Page = Annotated[PageRequest, Depends(_page)]


def cursor_of(page: PageRequest, total: int) -> Cursor:
    """Return the cursor of an answer that shows ``page`` of ``total`` rows."""
    return Cursor(offset=page.offset, limit=page.limit, total_count=total)
