"""Endpoint for the SDK's telemetry, which weft accepts and drops."""

import logging
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.authentication import AnyKey
from api.request_body import request_body
from api.route_bounds import TEXT_BODY, bounded
from api.services import Services

router = APIRouter(tags=["telemetry"])

_log = logging.getLogger(__name__)


class Accepted(BaseModel):
    """Answer of ``/telemetry``; the SDK knows no other status."""

    status: Literal["accepted"] = "accepted"


@router.post("/telemetry")
@bounded(body=TEXT_BODY)
async def telemetry(caller: AnyKey, services: Services, request: Request) -> Accepted:
    """Accept any body, also one of an unknown session, and drop it. Raises ``PayloadTooLarge``."""
    async with request_body(request, services, caller.tenant) as body:
        _log.debug("telemetry of tenant %s: %d bytes dropped", caller.tenant, len(body))
    return Accepted()
