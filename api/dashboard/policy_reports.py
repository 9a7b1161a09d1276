"""Reports of browsers on what the pages' content policy has kept from them: a sign of an injected text, or of a fault of a page.

Anybody may send one, so few are read, each is small, and no more than so many of a sender and a process are written down.
"""

from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter, Request, Response

from api.dashboard.login_guard import LoginGuard, address_name
from api.dashboard.security_headers import REPORTS
from api.route_bounds import KIB, bounded, bounds_of
from api.security_events import note_blocked
from api.services import ApiServices
from api.wire.body import read_body
from contracts.errors import OverRate, WeftError

MOST_REPORTS = 30
"""Reports of one address that are read in a minute."""
_LONGEST = 100
_TYPE = "application/csp-report"

router = APIRouter()


@router.post(REPORTS)
@bounded(body=16 * KIB)
async def take_report(request: Request) -> Response:
    """Write a browser's report to the security log. One that cannot be read, or is one too many, is dropped."""
    services: ApiServices = request.app.state.services
    guard: LoginGuard = request.app.state.report_guard
    now, address = services.runtime.clock(), address_name(request.scope)
    try:
        guard.check(address, now=now, most=MOST_REPORTS)
    except OverRate as refusal:
        return Response(status_code=refusal.status, headers={"Retry-After": str(refusal.retry_after)})
    guard.note(address, now=now)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _TYPE:
        return Response(status_code=400)
    idle = services.runtime.settings.body_timeout.total_seconds()
    try:
        raw = await read_body(request, bounds_of(request.scope).body_bytes, idle_seconds=idle)
    except WeftError as refusal:
        return Response(status_code=refusal.status)
    told = None if raw.is_cut else _told(raw.content)
    if told is None:
        return Response(status_code=400)
    note_blocked(request, told)
    return Response(status_code=204)


def _told(content: bytes) -> str | None:
    """Return the directive, the origin of what was blocked and the page's path; None for something else.

    Addresses are cut to what holds no secret: a path of weft's own pages has none, and of others the origin is enough.
    """
    try:
        report = orjson.loads(content)["csp-report"]
        directive = str(report.get("effective-directive") or report["violated-directive"])
        blocked, page = urlsplit(str(report["blocked-uri"])), urlsplit(str(report["document-uri"]))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    origin = f"{blocked.scheme}://{blocked.netloc}" if blocked.netloc else blocked.path
    return " ".join(repr(part[:_LONGEST])[1:-1] for part in (directive, "blocked", origin, "on", page.path))
