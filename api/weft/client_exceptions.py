"""Endpoint that lists exceptions of clients' scripts, as the SDK's telemetry told them."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.authentication import Reader
from api.services import Services
from api.wire.request_model import NO_NUL
from store.tables import ClientException
from tenants.client_exceptions import list_exceptions
from tenants.runs import get_run
from tenants.sessions import get_session

router = APIRouter(tags=["sessions"])

DEFAULT_EXCEPTIONS, MOST_EXCEPTIONS = 50, 200
_LARGEST_ID = 2**62

Text = Annotated[str | None, Query(max_length=200, pattern=NO_NUL)]


class ClientExceptionInfo(BaseModel):
    """An exception. ``at`` is when the service was told; ``traceback`` is empty where the SDK had none."""

    id: int
    session_id: str
    at: datetime
    error_type: str
    message: str
    traceback: str


class ClientExceptionList(BaseModel):
    """Exceptions, newest first; ``next`` is what to send as ``after`` for the next page, null on the last one."""

    exceptions: list[ClientExceptionInfo]
    next: int | None


@router.get("/client-exceptions")
async def list_client_exceptions(
    caller: Reader,
    services: Services,
    session_id: Text = None,
    run_id: Text = None,
    after: Annotated[int | None, Query(ge=0, le=_LARGEST_ID)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_EXCEPTIONS)] = DEFAULT_EXCEPTIONS,
) -> ClientExceptionList:
    """List what the scripts of the caller's sessions died of, or those of one session, or of one run's session.

    Raises ``NotFound`` for the session or the run.
    """
    async with services.runtime.database.survey() as session:
        if run_id is not None:
            of_run = (await get_run(session, caller.reach, run_id)).session_id
            if session_id not in (None, of_run):
                return ClientExceptionList(exceptions=[], next=None)
            session_id = of_run
        elif session_id is not None:
            await get_session(session, caller.reach, session_id)
        found = await list_exceptions(session, caller.reach, session_id=session_id, after=after, most=limit + 1)
    shown = found[:limit]
    return ClientExceptionList(
        exceptions=[_info(one) for one in shown], next=shown[-1].id if len(found) > limit else None
    )


def _info(row: ClientException) -> ClientExceptionInfo:
    return ClientExceptionInfo.model_validate(row, from_attributes=True)
