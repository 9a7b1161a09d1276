"""Work for one answer, given up when the client leaves before the answer is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what ``work`` returns, or None once the client has closed its connection; ``work`` is cancelled then.

    The request's body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])
        # An error's traceback has this frame: with the task that failed in it, neither would be freed before old objects are
        # looked at, nor what the request held.
        del working, leaving, task


async def _left(request: Request) -> None:
    """Return once the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
