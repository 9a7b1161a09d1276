"""The mark of what pages ask for by themselves, again and again: it is no use of a session, which ends idle all the same."""

from fastapi import Depends, Request


async def mark_unattended(request: Request) -> None:
    """Mark the request as one that no person made."""
    request.state.is_unattended = True


UNATTENDED = Depends(mark_unattended)
"""Put it into the ``dependencies`` of a route that a page follows by. It is read before the caller of the route is."""


def is_unattended(request: Request) -> bool:
    """Return whether no person made the request."""
    return getattr(request.state, "is_unattended", False)
