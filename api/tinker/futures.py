"""``retrieve_future``: a poll that is held until its operation is final."""

import asyncio
from typing import Annotated

import orjson
from fastapi import APIRouter, Request, Response

from api.json_body import PlainText, RequestModel, json_body
from api.services import ApiServices, Caller, Services
from api.wire.results import encode_result
from engine.contracts.errors import FutureGone
from engine.contracts.ids import TenantId
from tenants.models import OperationState
from workers.ledger.operations import OperationStatus

router = APIRouter(tags=["futures"])

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
            return _json({"type": "try_again", "request_id": status.id, "queue_state": "active"}, status_code=408)
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


def _json(content: dict[str, object], *, status_code: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status_code, media_type="application/json")
