"""Page of the queue: the tenant's own operations that wait, why, and what is before each; others' work as sums alone."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.rendering import page
from api.dashboard.web_session import PageReader
from api.services import Services
from api.weft.operations import list_own
from api.wire.request_model import NO_NUL

router = APIRouter(prefix="/queue")

_SHOWN = 50
After = Annotated[str | None, Query(max_length=100, pattern=NO_NUL)]


@router.get("")
async def queue_page(caller: PageReader, services: Services, request: Request, after: After = None) -> Response:
    """Show the operations that wait, in the order in which they were accepted."""
    found = await list_own(caller, services, after=after, limit=_SHOWN)
    return page(request, "tenant/queue.html", found=found, after=after)


@router.get("/table")
async def queue_table(caller: PageReader, services: Services, request: Request, after: After = None) -> Response:
    """Show the table alone, as it is now."""
    found = await list_own(caller, services, after=after, limit=_SHOWN)
    return page(request, "tenant/queue_table.html", found=found, after=after)
