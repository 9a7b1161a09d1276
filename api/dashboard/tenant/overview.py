"""The overview: what a tenant has left of its limits, and what its work does now."""

from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from api.dashboard.rendering import page
from api.dashboard.web_session import PageUsageReader
from api.paging import PageRequest
from api.services import ApiServices, Services
from api.weft.checkpoints import list_kept
from api.weft.operations import list_own
from api.weft.runs import list_runs
from api.weft.standing import usage_standing
from contracts.ledger_records import OperationState
from tenants.rights import Principal, Scope
from tenants.run_lists import ListedState

router = APIRouter(tags=["overview"])

_SHOWN = 6
_RECENT_LOSSES = 30
_SOON = 24 * 3600
"""Seconds within which a checkpoint's end is told."""
RELEASE = version("weft")


@router.get("")
async def overview(caller: PageUsageReader, services: Services, request: Request) -> Response:
    """Show the overview."""
    return await _shown(request, services, caller, "tenant/overview.html")


@router.get("/parts/overview")
async def overview_part(caller: PageUsageReader, services: Services, request: Request) -> Response:
    """Show the part of the overview that changes, which the page asks for again and again."""
    return await _shown(request, services, caller, "tenant/overview_part.html")


async def _shown(request: Request, services: ApiServices, caller: Principal, template: str) -> Response:
    standing = await usage_standing(caller, services)
    runs, waiting, failed, ending = None, None, None, None
    if Scope.READ in caller.scopes:
        runs = await list_runs(caller, services, state=ListedState.READY, recent=_RECENT_LOSSES, limit=_SHOWN)
        waiting = await list_own(caller, services, OperationState.PENDING, limit=_SHOWN)
        failed = await list_own(caller, services, OperationState.FAILED, limit=_SHOWN)
        shown = PageRequest(_SHOWN, 0)
        ending = await list_kept(caller, services, shown, expires_within=_SOON)
    return page(
        request,
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


def _bases(services: ApiServices, caller: Principal) -> list[str]:
    """Return the base models that the service has and the caller may use."""
    allowed = caller.rights.base_models
    return [name for name in services.bases if allowed is None or name in allowed]
