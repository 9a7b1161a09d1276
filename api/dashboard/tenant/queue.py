"""Page of the queue: the tenant's own operations that wait, why, and what is before each; others' work as sums alone."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.rendering import page
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import PageReader
from api.services import ApiServices, Services
from api.weft.operations import list_own
from api.wire.request_model import NO_NUL
from contracts.waiting import WaitReason
from tenants.rights import Principal
from tenants.samplers import sampled_runs

router = APIRouter(prefix="/queue")

_SHOWN = 50
After = Annotated[str | None, Query(max_length=100, pattern=NO_NUL)]


@router.get("")
async def queue_page(caller: PageReader, services: Services, request: Request, after: After = None) -> Response:
    """Show the operations that wait, in the order in which they were accepted."""
    return await _shown(request, services, caller, after, "tenant/queue.html")


@router.get("/table", dependencies=[UNATTENDED])
async def queue_table(caller: PageReader, services: Services, request: Request, after: After = None) -> Response:
    """Show the table alone, as it is now."""
    return await _shown(request, services, caller, after, "tenant/queue_table.html")


async def _shown(
    request: Request, services: ApiServices, caller: Principal, after: str | None, template: str
) -> Response:
    found = await list_own(caller, services, after=after, limit=_SHOWN)
    behind_gates = {one.lane for one in found.operations if one.wait and one.wait.reason is WaitReason.GATE_PAUSED}
    adapters: dict[str, str] = {}
    if behind_gates:
        async with services.runtime.database.read() as session:
            adapters = await sampled_runs(session, caller.reach, behind_gates)
    return page(request, template, found=found, after=after, adapters=adapters)
