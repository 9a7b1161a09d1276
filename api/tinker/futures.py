"""``retrieve_future``: a poll for an operation's result, held open until the result is there."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Request, Response
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import AnyKey, Sampler
from api.json_body import json_body
from api.request_body import off_loop
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.tinker.custom_losses import created_loss
from api.wire.request_model import PlainText, RequestModel
from api.wire.results import encode_result
from contracts.errors import Cancelled, FutureGone, InvalidRequest, NotFound, UnreadableOperation
from contracts.ids import TenantId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import OperationKind
from ledger.cancellation import OfOperation
from ledger.gaps import awaited_seq_id
from store.tables import Run, RunState
from tenants.limit_use import RUN_USE, SNAPSHOT_BYTES
from tenants.reach import check_lane
from tenants.rights import Principal
from tenants.runs import get_run, open_runs
from tenants.sample_waits import why_waits
from tenants.suspensions import suspension_of

router = APIRouter(tags=["futures"])

_CREATIONS = frozenset({OperationKind.CREATE_MODEL, OperationKind.LOAD_WEIGHTS})


class RetrieveRequest(RequestModel):
    """Request to wait for. With ``allow_metadata_only`` a large result is first announced by its size."""

    request_id: PlainText
    allow_metadata_only: bool | None = None


@router.post("/retrieve_future", response_class=Response)
@bounded(holding=Holding.POLL)
async def retrieve_future(
    caller: AnyKey,
    services: Services,
    request: Request,
    body: Annotated[RetrieveRequest, json_body(RetrieveRequest)],
) -> Response:
    """Return the outcome of a request, after waiting for at most ``poll_hold``.

    The answer is 408 while the request is pending: poll again. Raises ``NotFound``, ``FutureGone``.
    """
    if (loss := await created_loss(services, caller.tenant, body.request_id)) is not None:
        return _json(loss)
    await _check_reach(services, caller, body.request_id)
    hold = services.runtime.settings.poll_hold.total_seconds()
    status = await services.runtime.ledger.wait_until_final(caller.tenant, body.request_id, seconds=hold)
    match status.state:
        case OperationState.PENDING:
            # At 408 the SDK polls again at once and silently; at 200 with the same body it would log a warning each time.
            content = {
                "type": "try_again",
                "request_id": status.id,
                **await _queue_state(services, caller.tenant, status),
            }
            return _json(content, status_code=408)
        case OperationState.FAILED:
            return _json({"error": status.error_message or "failed", "category": status.error_category})
        case OperationState.DONE:
            return await _result(services, caller.tenant, status, request, announce=bool(body.allow_metadata_only))


class CancelRequest(RequestModel):
    """Request whose result nobody waits for any more."""

    request_id: PlainText


@router.post("/cancel_future", status_code=204)
async def cancel_future(
    caller: Sampler, services: Services, body: Annotated[CancelRequest, json_body(CancelRequest)]
) -> None:
    """End a sample that its client has abandoned; one that has ended stays as it is.

    Raises ``NotFound``, and ``InvalidRequest`` for a request that is no sample: a run's operations build on each other.
    """
    await _check_reach(services, caller, body.request_id)
    status = await services.runtime.ledger.status(caller.tenant, body.request_id)
    if status.kind is not OperationKind.SAMPLE:
        raise InvalidRequest(
            f"request_id: a {status.kind} cannot be cancelled, only samples can; leave its result unread"
        )
    if status.state is OperationState.PENDING:
        async with services.runtime.database.write() as transaction:
            error = Cancelled("cancelled by the client that sent it")
            await services.runtime.ledger.cancel(
                transaction, OfOperation(status.id, caller.tenant), error, only_samples=True
            )


async def _check_reach(services: ApiServices, caller: Principal, request_id: str) -> None:
    """Raise ``NotFound`` for a request of a project that the key does not reach."""
    if caller.projects is not None:
        status = await services.runtime.ledger.status(caller.tenant, request_id)
        async with services.runtime.database.read() as session:
            await check_lane(session, caller.reach, status.lane, NotFound(f"no request {request_id[:100]!r}"))


async def _result(
    services: ApiServices, caller: TenantId, status: OperationStatus, request: Request, *, announce: bool
) -> Response:
    size = status.result_bytes or 0
    if not status.pruned and announce and size > services.runtime.settings.metadata_only_bytes:
        return _json({"status": "complete_metadata", "response_payload_size": size})
    try:
        result = None if status.pruned else await services.runtime.ledger.result(caller, status)
    except UnreadableOperation as error:
        return _json({"error": error.message, "category": error.category})
    if result is None:
        raise FutureGone(
            f"the result of request {status.id} was kept for its grace time and is gone; send a new request"
        )
    accept = request.headers.get("accept", "")
    encoded = await off_loop(services, caller, size, encode_result, status.kind, result, accept=accept)
    return Response(encoded.body, media_type=encoded.media_type)


async def _queue_state(services: ApiServices, caller: TenantId, status: OperationStatus) -> dict[str, object]:
    """Return the state of a pending operation's queue, with the reason if the operation is held back."""
    async with services.runtime.database.read() as session:
        suspension = await suspension_of(session, caller)
    if suspension is not None:
        told = suspension.reason or "ask the service's operator why"
        return {"queue_state": "paused_capacity", "queue_state_reason": f"this tenant's work is suspended: {told}"}
    if status.kind in _CREATIONS:
        async with services.runtime.database.read() as session:
            run = await get_run(session, caller, status.lane)
            reason = await _full(services, session, run) if run.state == RunState.CREATING else None
        if reason is not None:
            return {"queue_state": "paused_capacity", "queue_state_reason": reason}
    if status.kind is OperationKind.SAMPLE:
        async with services.runtime.database.read() as session:
            reason = await why_waits(session, caller, status.lane, services.runtime.clock)
        if reason is not None:
            return {"queue_state": "paused_capacity", "queue_state_reason": reason}
    elif status.kind is not OperationKind.UNLOAD_MODEL:
        async with services.runtime.database.read() as session:
            awaited = await awaited_seq_id(session, caller, status.lane)
        if awaited is not None:
            minutes = services.runtime.settings.gap_grace.total_seconds() / 60
            told = (
                f"seq_id {awaited} of this model has not come, and this request waits for it; {minutes:.0f} minutes after "
                "the model's last request it counts as failed, and this one runs"
            )
            return {"queue_state": "paused_capacity", "queue_state_reason": told}
    return {"queue_state": "active"}


async def _full(services: ApiServices, session: AsyncSession, run: Run) -> str | None:
    """Return why a run that is not made yet waits, or None if there is room for it."""
    use = await RUN_USE.of(session, TenantId(run.tenant_id), services.limits)
    if use.room("open_runs") < 1:
        return (
            f"you have {use.used['open_runs']} models open, and your limit is {use.limits.open_runs}; this one is created "
            "when another is unloaded or its session ends"
        )
    if not use.may_open_run:
        return (
            f"the snapshots of your models take {use.used[SNAPSHOT_BYTES]} of {use.limits.stored_bytes} bytes of storage; this "
            "one is created when others are unloaded, or some time after their sessions end"
        )
    limit = services.runtime.settings.max_adapters
    if limit is not None and await open_runs(session, run.base_model) >= limit:
        return f"{limit} models are open on {run.base_model}; this one is created when another is unloaded"
    return None


def _json(content: dict[str, object], *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
