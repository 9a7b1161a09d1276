"""Endpoints that tell why a run or a request waits, since when, behind what and for how long at most."""

from fastapi import APIRouter

from api.authentication import AnyKey, Reader
from api.json_body import PathId
from api.services import Services
from api.waiting_body import WaitingInfo, waiting_info, waiting_of_run
from contracts.errors import NotFound
from contracts.ledger_records import OperationState
from tenants.reach import check_lane
from tenants.runs import get_run

router = APIRouter(tags=["waiting"])


@router.get("/runs/{run_id}/waiting")
async def why_a_run_waits(caller: Reader, services: Services, run_id: PathId) -> WaitingInfo:
    """Tell why the run's next operation has not ended, or why its client is refused new passes. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        return await waiting_of_run(session, services.waits, run)


@router.get("/requests/{request_id}/waiting")
async def why_a_request_waits(caller: AnyKey, services: Services, request_id: PathId) -> WaitingInfo:
    """Tell why a sample, or an operation of a run, has not ended. Raises ``NotFound``."""
    status = await services.runtime.ledger.status(caller.tenant, request_id)
    async with services.runtime.database.read() as session:
        await check_lane(session, caller.reach, status.lane, NotFound(f"no request {request_id[:100]!r}"))
        if status.state is not OperationState.PENDING:
            return WaitingInfo()
        return await waiting_info(session, services.waits, status.id)
