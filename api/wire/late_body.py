"""Callers of bodies that come late, checked once more when the body is there: a key may end while a body is held back.

Whoever makes out a request's caller tells here how to check it again; the reader of bodies does so.
"""

from collections.abc import Awaitable, Callable
from time import monotonic

from starlette.requests import Request

MOMENT_SECONDS = 1.0
"""Age up to which a check of the caller is good for a body. Usual bodies come with their headers and cost no second check."""

Check = Callable[[Request], Awaitable[None]]
"""Raises what the request is refused with, if its caller may no longer send it."""


def check_after_body(request: Request, check: Check) -> None:
    """Have ``check`` called after the request's body, if that comes late. Its caller was checked a moment ago."""
    request.state.caller_check = monotonic(), check


async def check_late_body(request: Request) -> None:
    """Check the caller again, unless that was done within the last moment. Raises as its ``Check``.

    A request without a known caller, as a login is, has nothing to check.
    """
    checked_at, check = getattr(request.state, "caller_check", (0.0, None))
    if check is not None and monotonic() - checked_at >= MOMENT_SECONDS:
        await check(request)


async def check_caller(request: Request) -> None:
    """Check the caller again, whenever that was done last. Raises as its ``Check``."""
    _, check = getattr(request.state, "caller_check", (0.0, None))
    if check is not None:
        await check(request)
