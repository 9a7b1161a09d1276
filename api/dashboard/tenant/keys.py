"""Keys of a tenant: list, make, rotate and revoke them, as the API does, within the rights of one's own."""

import secrets
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from api.dashboard.form_values import integer
from api.dashboard.forms import Form, parsed, see
from api.dashboard.rendering import large_page
from api.dashboard.web_session import PageKeyAdmin
from api.key_records import MadeKey, NewKeyRequest, RotateRequest
from api.route_bounds import bounded
from api.services import ApiServices, Services
from api.weft import keys
from contracts.errors import InvalidRequest, WeftError
from tenants.rights import TENANT_ROLES, Principal

router = APIRouter(tags=["keys"])

Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
_LONGEST_DAYS = 3650
_STEP_SECONDS = 3600
"""Steps from the time at which a form was shown, in which the end of its key moves on while the page stays open."""


@router.get("/keys")
async def own_keys(caller: PageKeyAdmin, services: Services, request: Request) -> Response:
    """List the tenant's keys."""
    return await _shown(request, services, caller)


@router.post("/keys")
async def make_key(caller: PageKeyAdmin, services: Services, request: Request, form: Form) -> Response:
    """Make a key and show it once. The same form sent again shows the same key."""
    values: dict[str, object] = {"note": form.get("note", ""), "role": form.get("role", "member")}
    try:
        if (days := integer(form, "days")) is not None:
            values["expires_at"] = _asked_at(form, services.runtime.clock()) + timedelta(days=_checked_days(days))
        asked = parsed(NewKeyRequest, values)
        made = await keys.make_key(caller, services, request, asked, _repeat_name(form))
    except WeftError as error:
        return await _shown(request, services, caller, problem=error)
    return await _shown(request, services, caller, made=made)


def _asked_at(form: Form, now: datetime) -> datetime:
    """Return the time from which the form's days count: the same if the form is sent again, at most an hour ago."""
    seconds = int(now.timestamp())
    shown = integer(form, "shown")
    if shown is None or shown > seconds:
        return now
    return datetime.fromtimestamp(seconds - (seconds - shown) % _STEP_SECONDS, UTC)


def _checked_days(days: int) -> int:
    if not 1 <= days <= _LONGEST_DAYS:
        raise InvalidRequest(
            f"a key ends after 1 to {_LONGEST_DAYS} days; leave the field empty for one that does not end"
        )
    return days


@router.post("/keys/{number}/rotate")
@bounded(goes_on=True)
async def rotate_key(
    caller: PageKeyAdmin, services: Services, request: Request, number: Number, form: Form
) -> Response:
    """Make a key in place of another, which goes on for an hour, and show it once."""
    try:
        made = await keys.rotate(caller, services, request, number, RotateRequest(), _repeat_name(form))
    except WeftError as error:
        return await _shown(request, services, caller, problem=error)
    return await _shown(request, services, caller, made=made)


@router.post("/keys/{number}/revoke")
@bounded(goes_on=True)
async def revoke_key(caller: PageKeyAdmin, services: Services, request: Request, number: Number) -> Response:
    """Revoke a key. Its web sessions end with it."""
    try:
        await keys.revoke(caller, services, request, number)
    except WeftError as error:
        return await _shown(request, services, caller, problem=error)
    return see("/ui/keys")


async def _shown(
    request: Request,
    services: ApiServices,
    caller: Principal,
    *,
    made: MadeKey | None = None,
    problem: WeftError | None = None,
) -> Response:
    return await large_page(
        request,
        caller,
        "tenant/keys.html",
        status=200 if problem is None else problem.status,
        keys=await keys.own_key_bodies(caller, services),
        made=made,
        problem="" if problem is None else problem.message,
        roles=TENANT_ROLES,
        repeat=secrets.token_urlsafe(16),
    )


def _repeat_name(form: Form) -> str | None:
    """Return the name by which a form that is sent twice is known; each shown form has another."""
    return form.get("repeat", "")[:100] or None
