"""``retrieve_future``: a poll that is held until its operation is final."""

import asyncio
from typing import Annotated

import orjson
from fastapi import APIRouter, Request, Response

from api.services import ApiServices, Caller, Services
from api.wire.json_body import PlainText, RequestModel, json_body
from api.wire.results import encode_result
from contracts.errors import FutureGone
from contracts.ids import TenantId
from contracts.ledger_records import OperationState, OperationStatus
from contracts.operations import OperationKind
from store.tables import RunState
from tenants.runs import get_run, open_runs

router = APIRouter(tags=["futures"])

_CREATIONS = frozenset({OperationKind.CREATE_MODEL, OperationKind.LOAD_WEIGHTS})
_INLINE_BYTES = 64 * 1024
"""A result up to this size is encoded on the event loop: a thread would cost more than the work."""


class RetrieveRequest(RequestModel):
    """Which result; ``allow_metadata_only`` lets a large one be announced by its size first."""

    request_id: PlainText
    allow_metadata_only: bool | None = None


@router.post("/retrieve_future", response_class=Response)
async def retrieve_future(
    caller: Caller,
    services: Services,
    request: Request,
    body: Annotated[RetrieveRequest, json_body(RetrieveRequest)],
) -> Response:
    """The operation's outcome, waited for at most ``poll_hold``. Raises ``NotFound``, ``FutureGone``."""
    hold = services.settings.poll_hold.total_seconds()
    status = await services.ledger.wait_until_final(caller, body.request_id, seconds=hold)
    match status.state:
        case OperationState.PENDING:
            # 408 makes the SDK poll again at once and silently; a 200 with the same body would log a warning each time.
            content = {"type": "try_again", "request_id": status.id, **await _queue_state(services, caller, status)}
            return _json(content, status_code=408)
        case OperationState.FAILED:
            return _json({"error": status.error_message or "failed", "category": status.error_category})
        case OperationState.DONE:
            return await _result(services, caller, status, request, announce=bool(body.allow_metadata_only))


async def _result(
    services: ApiServices, caller: TenantId, status: OperationStatus, request: Request, *, announce: bool
) -> Response:
    size = status.result_bytes or 0
    if not status.pruned and announce and size > services.settings.metadata_only_bytes:
        return _json({"status": "complete_metadata", "response_payload_size": size})
    result = None if status.pruned else await services.ledger.result(caller, status)
    if result is None:
        raise FutureGone(f"the result of request {status.id} was kept for its grace time and is gone")
    accept = request.headers.get("accept", "")
    if size <= _INLINE_BYTES:
        encoded = encode_result(status.kind, result, accept=accept)
    else:
        encoded = await asyncio.to_thread(encode_result, status.kind, result, accept=accept)
    return Response(encoded.body, media_type=encoded.media_type)


async def _queue_state(services: ApiServices, caller: TenantId, status: OperationStatus) -> dict[str, object]:
    """Whether the operation is held back, and why."""
    limit = services.settings.max_adapters
    if limit is not None and status.kind in _CREATIONS:
        async with services.database.read() as session:
            run = await get_run(session, caller, status.lane)
            is_full = run.state == RunState.CREATING and await open_runs(session, run.base_model) >= limit
        if is_full:
            reason = f"{limit} models are open on {run.base_model}; this one is made when another is unloaded"
            return {"queue_state": "paused_capacity", "queue_state_reason": reason}
    return {"queue_state": "active"}


def _json(content: dict[str, object], *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
