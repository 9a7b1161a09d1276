"""Errors of a tenant: exceptions that ended its scripts, sessions that went silent, and failed operations with their texts."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from api.dashboard.rendering import page
from api.dashboard.web_session import PageReader
from api.services import Services
from api.weft.client_exceptions import list_client_exceptions
from api.weft.operations import list_own
from api.wire.request_model import NO_NUL
from contracts.ledger_records import OperationState
from tenants.sessions import list_lost_sessions

router = APIRouter(tags=["errors"])

SHOWN_EXCEPTIONS = 20
SHOWN_SESSIONS = 20


@router.get("/errors")
async def errors(
    caller: PageReader,
    services: Services,
    request: Request,
    after: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
    after_exception: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    run: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
) -> Response:
    """List exceptions of scripts, sessions that went silent, those of ``run``'s session if it is given, and failed operations.

    The newest of each come first.
    """
    died = await list_client_exceptions(caller, services, run_id=run, after=after_exception, limit=SHOWN_EXCEPTIONS)
    async with services.runtime.database.survey() as session:
        of_run = None if run is None else run.partition(":")[0]
        lost = await list_lost_sessions(session, caller.reach, session_id=of_run, most=SHOWN_SESSIONS)
    failed = await list_own(caller, services, OperationState.FAILED, lane=run, after=after, limit=50)
    return page(
        request,
        "tenant/errors.html",
        died=died,
        lost=lost,
        failed=failed,
        run=run,
        is_first=after is None,
        is_newest=after_exception is None,
    )
