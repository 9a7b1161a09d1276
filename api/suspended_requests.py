"""Requests of suspended tenants: a blocked one is refused each, a read-only one what changes something and does not end it."""

from fastapi import Request

from api.route_bounds import bounds_of
from contracts.errors import Unavailable
from tenants.rights import Principal, SuspendMode

_GOES_ON = frozenset({"GET", "HEAD", "DELETE"})


def check_standing(request: Request, caller: Principal) -> None:
    """Raise ``Suspended`` for a request that the mode of its tenant's suspension refuses."""
    caller.check_not_blocked()
    if request.method not in _GOES_ON and not bounds_of(request.scope).goes_on:
        caller.check_new_work()


def check_standing_again(request: Request, before: Principal, caller: Principal) -> None:
    """Check the caller as it is after a late body; its endpoint goes on with the caller as it was ``before``.

    Raises as ``check_standing``, and ``Unavailable`` if the tenant has become read-only: a repeat is judged by that.
    """
    check_standing(request, caller)
    if caller.suspension is SuspendMode.READ_ONLY and before.suspension is not SuspendMode.READ_ONLY:
        raise Unavailable("this tenant has become read-only while the request came in; send it again")
