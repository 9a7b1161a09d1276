"""``retrieve_future``: a poll for an operation's result, held open until the result is there."""

from typing import Annotated

import orjson
from fastapi import APIRouter, Request, Response

from api.authentication import AnyKey, SampleCaller
from api.json_body import json_body
from api.request_body import off_loop
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.tinker.custom_losses import created_loss
from api.wire.request_model import PlainText, RequestModel
from api.wire.results import encode_result
from contracts.errors import Cancelled, ClientSilent, FutureGone, InvalidRequest, NotFound, UnreadableOperation
from contracts.ids import TenantId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import OperationKind
from ledger.cancellation import OfOperation
from tenants.reach import check_lane
from tenants.rights import Principal

router = APIRouter(tags=["futures"])


class RetrieveRequest(RequestModel):
    """Request to wait for. With ``allow_metadata_only`` a large result is first announced by its size."""

    request_id: PlainText
    allow_metadata_only: bool | None = None


@router.post("/retrieve_future", response_class=Response)
@bounded(holding=Holding.POLL, is_counted=False)
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
            content = {"type": "try_again", "request_id": status.id, **await _queue_state(services, status)}
            return _json(content, status_code=408)
        case OperationState.FAILED:
            if status.error_code == ClientSilent.code:
                # The SDK sends the sample again at 410, and at no error in an answer.
                raise FutureGone(status.error_message or "cancelled: the client was silent; send a new request")
            return _json({"error": status.error_message or "failed", "category": status.error_category})
        case OperationState.DONE:
            return await _result(services, caller.tenant, status, request, announce=bool(body.allow_metadata_only))


class CancelRequest(RequestModel):
    """Request whose result nobody waits for any more."""

    request_id: PlainText


@router.post("/cancel_future", status_code=204)
@bounded(is_counted=False)
async def cancel_future(
    caller: SampleCaller, services: Services, body: Annotated[CancelRequest, json_body(CancelRequest)]
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


async def _queue_state(services: ApiServices, status: OperationStatus) -> dict[str, object]:
    """Return the state of a pending operation's queue, and why the operation waits."""
    wait = await services.waits.of(status.id)
    if wait is None:
        return {"queue_state": "active"}
    return {"queue_state": wait.queue_state, "queue_state_reason": wait.text}


def _json(content: dict[str, object], *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
