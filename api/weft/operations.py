"""Endpoint that lists a tenant's own operations: what waits, with the reason and what is before it, and what has ended."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import Reader
from api.services import ApiServices, Services
from api.waiting_body import WaitingInfo, waiting_body
from api.wire.request_model import NO_NUL
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from ledger.inspection import InspectedOperation, OperationFilter, list_operations

router = APIRouter(tags=["waiting"])

DEFAULT_OPERATIONS, MOST_OPERATIONS = 50, 200
MOST_AHEAD = 10
"""Operations of an answer for which the work before them is added up: each costs statements of its own."""

Text = Annotated[str | None, Query(max_length=200, pattern=NO_NUL)]


class OwnOperation(BaseModel):
    """An operation. ``wait`` is null once it has ended; ``lane`` is its run's or its sampler's id."""

    request_id: str
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    state: OperationState
    created_at: datetime
    finished_at: datetime | None
    tokens: int
    trace_id: str | None
    error_code: str | None
    error: str | None
    wait: WaitingInfo | None


class OperationList(BaseModel):
    """Operations: pending ones oldest first, others newest first. ``next`` is the next page's ``after``, null on the last one."""

    operations: list[OwnOperation]
    next: str | None


@router.get("/operations")
async def list_own(
    caller: Reader,
    services: Services,
    state: OperationState = OperationState.PENDING,
    lane: Text = None,
    kind: OperationKind | None = None,
    after: Text = None,
    limit: Annotated[int, Query(ge=1, le=MOST_OPERATIONS)] = DEFAULT_OPERATIONS,
) -> OperationList:
    """List the caller's operations. The first pending ones that wait for their turn come with the work before them.

    Done operations are looked for in the given lane, or else among the service's last 10,000. Raises ``NotFound`` for an
    ``after`` that is no operation.
    """
    which = OperationFilter(state, lane=lane, kind=kind, after=after, owner=caller.reach)
    async with services.runtime.database.survey() as session:
        found = await list_operations(session, which, most=limit + 1, waits=services.waits)
        shown = found[:limit]
        waits = await _waits(services, session, shown)
    listed = [_operation(one, waits.get(one.id)) for one in shown]
    return OperationList(operations=listed, next=shown[-1].id if len(found) > limit else None)


async def _waits(
    services: ApiServices, session: AsyncSession, operations: list[InspectedOperation]
) -> dict[str, WaitingInfo]:
    bodies: dict[str, WaitingInfo] = {}
    added_up = 0
    for one in operations:
        if one.wait is None:
            continue
        ahead = None
        if added_up < MOST_AHEAD and one.wait.cause is one.wait.reason:
            ahead = await services.waits.ahead(session, one.id, one.wait)
            added_up += ahead is not None
        bodies[one.id] = waiting_body(one.id, one.wait, ahead)
    return bodies


def _operation(found: InspectedOperation, wait: WaitingInfo | None) -> OwnOperation:
    return OwnOperation(
        request_id=found.id,
        lane=found.lane,
        seq_id=found.seq_id,
        kind=found.kind,
        base_model=found.base_model,
        state=found.state,
        created_at=found.created_at,
        finished_at=found.finished_at,
        tokens=found.tokens,
        trace_id=found.trace_id,
        error_code=found.error_code,
        error=found.error_message,
        wait=wait,
    )
