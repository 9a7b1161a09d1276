"""Operations for operators: what waits and why; end one, or have it begun anew."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, PathId, QueryText, ReasonBody, listed, operator_body
from api.admin.repeats import Once
from api.admin.services import Admin, AdminServices, Caller
from api.waiting_body import WaitingInfo, waiting_body
from contracts.errors import Cancelled, EngineFailure, InvalidRequest, WeftError
from contracts.ledger_records import OperationState
from contracts.operations import OperationKind
from ledger.cancellation import OfOperation
from ledger.inspection import InspectedOperation, OperationFilter, inspect_operation, list_operations
from ledger.requeue import requeue_operation
from ledger.wakeups import recalls_topic, sampling_topic
from store.database import after_commit
from store.tables import Operation
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.operator_keys import Operator
from tenants.tenant_names import find_tenant

router = APIRouter(tags=["operations"])


class OperationBody(BaseModel):
    """An operation. ``tenant`` is a name; ``wait`` is null once the operation is final, and in a list without what is ahead."""

    id: str
    tenant: str
    lane: str
    seq_id: int
    kind: OperationKind
    base_model: str
    state: OperationState
    created_at: datetime
    age_seconds: float
    finished_at: datetime | None
    tokens: int
    attempts: int
    trace_id: str | None
    error_code: str | None
    error_message: str | None
    wait: WaitingInfo | None


class TouchedOperation(BaseModel):
    """An operation that was ended, with its ``error_code``, or that is to begin anew."""

    id: str
    error_code: str | None = None


@router.get("/operations")
async def list_all_operations(
    caller: Caller,
    admin: Admin,
    state: OperationState = OperationState.PENDING,
    tenant: QueryText = None,
    lane: QueryText = None,
    kind: OperationKind | None = None,
    after: After = None,
    limit: Limit = 50,
) -> Listed[OperationBody]:
    """List operations: pending ones oldest first with what each waits for, others newest first with their error.

    Done operations are looked for in the given lane, or else among the last 10,000 that were accepted. Raises ``NotFound`` for
    an ``after`` that is no operation, and for an unknown tenant.
    """
    del caller
    waits = await admin.waits()
    which = OperationFilter(state, tenant, lane, kind, after)
    async with admin.runtime.database.survey() as session:
        if tenant is not None:
            await find_tenant(session, name=tenant)
        found = await list_operations(session, which, most=limit + 1, waits=waits)
    return listed([_body(one, waits.now()) for one in found], limit, [one.id for one in found])


@router.get("/operations/{operation_id}")
async def show_operation(caller: Caller, admin: Admin, operation_id: PathId) -> OperationBody:
    """Show one operation: where it belongs, its age, attempts, and what it waits for or how it ended. Raises ``NotFound``."""
    del caller
    waits = await admin.waits()
    async with admin.runtime.database.read() as session:
        found = await inspect_operation(session, operation_id, waits=waits)
        body = _body(found, waits.now())
        if found.wait is not None:
            ahead = await waits.ahead(session, found.id, found.wait)
            body.wait = waiting_body(found.id, found.wait, ahead)
    return body


@router.post("/operations/{operation_id}/cancellation")
async def cancel_operation(
    caller: Caller,
    admin: Admin,
    request: Request,
    operation_id: PathId,
    body: Annotated[ReasonBody, operator_body(ReasonBody)],
    repeats: Once,
) -> TouchedOperation:
    """End a pending operation. Its tenant reads that it was cancelled; its run goes on with the next.

    Raises ``NotFound``, ``InvalidRequest`` for one that has ended, and for an unload.
    """
    error = Cancelled(_told("cancelled by the service's operator", body.reason))
    async with admin.runtime.database.write() as transaction:

        async def make() -> TouchedOperation:
            ended = await _end(transaction, admin, operation_id, error)
            await _record(transaction, admin, request, caller, Action.OPERATION_CANCEL, operation_id, body.reason)
            return ended

        return await repeats.once(transaction, body, TouchedOperation, make)


@router.post("/operations/{operation_id}/failure")
async def fail_operation(
    caller: Caller,
    admin: Admin,
    request: Request,
    operation_id: PathId,
    body: Annotated[ReasonBody, operator_body(ReasonBody)],
    repeats: Once,
) -> TouchedOperation:
    """End a pending operation as the service's own failure; its run goes on with the next.

    Raises ``NotFound``, ``InvalidRequest`` for one that has ended, and for an unload.
    """
    told = _told("the service's operator has failed this operation", body.reason)
    async with admin.runtime.database.write() as transaction:

        async def make() -> TouchedOperation:
            ended = await _end(transaction, admin, operation_id, EngineFailure(told))
            await _record(transaction, admin, request, caller, Action.OPERATION_FAIL, operation_id, body.reason)
            return ended

        return await repeats.once(transaction, body, TouchedOperation, make)


@router.post("/operations/{operation_id}/requeue")
async def requeue(
    caller: Caller, admin: Admin, request: Request, operation_id: PathId, repeats: Once
) -> TouchedOperation:
    """Have a pending operation begun anew: claims and attempts are forgotten, and its run is rebuilt from the ledger.

    An operation that is done keeps its result. Requeue one at which trainers died when they replayed it. Raises ``NotFound``,
    ``InvalidRequest`` for any other operation that has ended.
    """
    async with admin.runtime.database.write() as transaction:

        async def make() -> TouchedOperation:
            found = await requeue_operation(transaction, operation_id)
            await _record(transaction, admin, request, caller, Action.OPERATION_REQUEUE, operation_id)
            topics = [sampling_topic(found.base_model)] if found.kind is OperationKind.SAMPLE else []
            topics += [recalls_topic(found.trainer)] if found.trainer is not None else []

            def announce() -> None:
                for topic in topics:
                    admin.runtime.wakeups.announce(topic)

            after_commit(transaction, announce)
            return TouchedOperation(id=operation_id)

        return await repeats.once(transaction, None, TouchedOperation, make)


async def _end(transaction: AsyncSession, admin: AdminServices, operation: str, error: WeftError) -> TouchedOperation:
    if not await admin.runtime.ledger.cancel(transaction, OfOperation(operation), error):
        found = await inspect_operation(transaction, operation, waits=await admin.waits())
        what = "an unload is never ended" if found.state is OperationState.PENDING else f"it is {found.state}"
        raise InvalidRequest(f"operation {operation[:100]} was not ended: {what}")
    return TouchedOperation(id=operation, error_code=error.code)


async def _record(
    transaction: AsyncSession,
    admin: AdminServices,
    request: Request,
    caller: Operator,
    action: Action,
    operation: str,
    reason: str = "",
) -> None:
    columns = select(Operation.tenant_id, Operation.lane).where(Operation.id == operation)
    found = (await transaction.execute(columns)).one()
    await record_operator(
        transaction,
        admin,
        request,
        caller,
        action,
        operation,
        tenant=found.tenant_id,
        session_id=session_of(found.lane),
        after={"reason": reason or None},
    )


def _told(what: str, reason: str) -> str:
    return f"{what}: {reason}" if reason else what


def _body(one: InspectedOperation, now: datetime) -> OperationBody:
    age = (now - one.created_at).total_seconds()
    wait = None if one.wait is None else waiting_body(one.id, one.wait)
    return OperationBody(
        id=one.id,
        tenant=one.tenant,
        lane=one.lane,
        seq_id=one.seq_id,
        kind=one.kind,
        base_model=one.base_model,
        state=one.state,
        created_at=one.created_at,
        age_seconds=age,
        finished_at=one.finished_at,
        tokens=one.tokens,
        attempts=one.attempts,
        trace_id=one.trace_id,
        error_code=one.error_code,
        error_message=one.error_message,
        wait=wait,
    )
