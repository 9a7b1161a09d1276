"""The SDK's telemetry: accepted and dropped. weft keeps nothing of it."""

import logging
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.services import Caller, Services
from api.wire.body import read_body

router = APIRouter(tags=["telemetry"])

_log = logging.getLogger(__name__)


class Accepted(BaseModel):
    """The only status the SDK knows."""

    status: Literal["accepted"] = "accepted"


@router.post("/telemetry")
async def telemetry(caller: Caller, services: Services, request: Request) -> Accepted:
    """Take whatever comes: an unknown session is fine. Raises ``PayloadTooLarge``."""
    body = await read_body(request, services.settings.max_body_bytes)
    _log.debug("telemetry of tenant %s: %d bytes dropped", caller, len(body))
    return Accepted()
