"""The overview: what a tenant has left of its limits, and what its work does now."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from api.dashboard.rendering import large_page
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import PageUsageReader
from api.paging import PageRequest
from api.services import ApiServices, Services
from api.weft.checkpoints import KeptFilter, kept_checkpoints
from api.weft.client_exceptions import list_client_exceptions
from api.weft.operations import list_own
from api.weft.runs import list_runs
from api.weft.standing import own_standing
from contracts.ledger_records import OperationState
from tenants.rights import Principal, Scope
from tenants.run_lists import ListedState
from tenants.sessions import list_lost_sessions

router = APIRouter(tags=["overview"])

_SHOWN = 6
_RECENT_LOSSES = 30
_SOON = 24 * 3600
"""Seconds within which a checkpoint's end is told."""
_LATELY = timedelta(days=1)
RELEASE = version("weft")


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that went wrong: ``what`` is a kind of operation, ``script`` or ``session``."""

    at: datetime
    what: str
    code: str
    text: str


@router.get("")
async def overview(caller: PageUsageReader, services: Services, request: Request) -> Response:
    """Show the overview."""
    return await _shown(request, services, caller, "tenant/overview.html")


@router.get("/parts/overview", dependencies=[UNATTENDED])
async def overview_part(caller: PageUsageReader, services: Services, request: Request) -> Response:
    """Show the part of the overview that changes, which the page asks for again and again."""
    return await _shown(request, services, caller, "tenant/overview_part.html")


async def _shown(request: Request, services: ApiServices, caller: Principal, template: str) -> Response:
    standing = await own_standing(caller, services)
    runs, waiting, failed, ending = None, None, None, None
    if Scope.READ in caller.scopes:
        runs = await list_runs(caller, services, state=ListedState.READY, recent=_RECENT_LOSSES, limit=_SHOWN)
        waiting = await list_own(caller, services, OperationState.PENDING, limit=_SHOWN)
        failed = await _failures(services, caller)
        ending = await kept_checkpoints(caller, services, PageRequest(_SHOWN, 0), KeptFilter(expires_within=_SOON))
    return await large_page(
        request,
        caller,
        template,
        standing=standing,
        by_part=sorted(standing.limits, key=lambda one: -(one.used or 0) / (one.value or 1)),
        bases=_bases(services, caller),
        release=RELEASE,
        runs=runs,
        waiting=waiting,
        failed=failed,
        ending=ending,
    )


async def _failures(services: ApiServices, caller: Principal) -> list[Failure]:
    """Return what went wrong within a day, the newest first: what the page of errors has more of."""
    since = services.runtime.clock() - _LATELY
    operations = await list_own(caller, services, OperationState.FAILED, limit=_SHOWN)
    died = await list_client_exceptions(caller, services, limit=_SHOWN)
    async with services.runtime.database.read() as session:
        lost = await list_lost_sessions(session, caller.reach, since=since, most=_SHOWN)
    found = [
        *(
            Failure(one.finished_at, one.kind, one.error_code or "failed", one.error or "")
            for one in operations.operations
            if one.finished_at is not None
        ),
        *(Failure(one.at, "script", one.error_type, one.message) for one in died.exceptions),
        *(
            Failure(one.ended_at, "session", "lost", f"the heartbeats of {one.display_name or one.id} stopped")
            for one in lost
            if one.ended_at is not None
        ),
    ]
    lately = [one for one in found if one.at >= since]
    return sorted(lately, key=lambda one: one.at, reverse=True)[:_SHOWN]


def _bases(services: ApiServices, caller: Principal) -> list[str]:
    """Return the base models that the service has and the caller may use."""
    allowed = caller.rights.base_models
    return [name for name in services.bases if allowed is None or name in allowed]
