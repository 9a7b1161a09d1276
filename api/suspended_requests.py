"""Requests of suspended tenants: a blocked one is refused each, a read-only one what changes something and does not end it."""

from fastapi import Request

from api.route_bounds import bounds_of
from tenants.rights import Principal

_GOES_ON = frozenset({"GET", "HEAD", "DELETE"})


def check_standing(request: Request, caller: Principal) -> None:
    """Raise ``Suspended`` for a request that the mode of its tenant's suspension refuses."""
    caller.check_not_blocked()
    if request.method not in _GOES_ON and not bounds_of(request.scope).goes_on:
        caller.check_new_work()
