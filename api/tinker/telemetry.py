"""Endpoint for the SDK's telemetry, of which weft keeps the exceptions of clients' scripts and drops the rest."""

import logging
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.authentication import AnyKey
from api.request_body import off_loop, request_body
from api.route_bounds import TEXT_BODY, bounded
from api.services import Services
from api.wire.json_counts import SMALL, check_json_counts
from contracts.client_exceptions import ToldExceptions, may_tell_exceptions, told_exceptions
from contracts.errors import InvalidRequest
from tenants.client_exceptions import record_exceptions

router = APIRouter(tags=["telemetry"])

_log = logging.getLogger(__name__)


class Accepted(BaseModel):
    """Answer of ``/telemetry``; the SDK knows no other status."""

    status: Literal["accepted"] = "accepted"


@router.post("/telemetry")
@bounded(body=TEXT_BODY, is_counted=False)
async def telemetry(caller: AnyKey, services: Services, request: Request) -> Accepted:
    """Accept any body, and keep the unhandled exceptions of the caller's session that it tells. Raises ``PayloadTooLarge``.

    A repeat of an event changes nothing.
    """
    told: ToldExceptions | None = None
    async with request_body(request, services, caller.tenant) as body:
        if may_tell_exceptions(body):
            told = await off_loop(services, caller.tenant, len(body), _told, body)
    if told is not None:
        async with services.runtime.database.write() as transaction:
            await record_exceptions(transaction, caller, told, services.runtime.clock())
    return Accepted()


def _told(body: bytes) -> ToldExceptions | None:
    try:
        check_json_counts(body, SMALL)
    except InvalidRequest as error:
        _log.debug("telemetry dropped: %s", error)
        return None
    return told_exceptions(body)
