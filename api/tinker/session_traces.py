"""Endpoints of a session's timeline: a link to it, and the file that the link leads to.

The file is in the Trace Event Format, which https://ui.perfetto.dev opens:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from api.authentication import Reader
from api.json_body import PathId
from api.public_address import public_address
from api.services import Services
from contracts.errors import NotFound, Suspended, Unauthenticated
from ledger.session_trace import TracedOperation, session_trace
from store.fair_places import ask_for
from tenants.keys import describe_key
from tenants.sessions import get_session

router = APIRouter(tags=["sessions"])

_PURPOSE = "session trace"
_LIFETIME = timedelta(hours=1)


class TraceExport(BaseModel):
    """A link to a session's timeline. A client of the hosted service would ask again while it is ``pending``."""

    status: Literal["ready"] = "ready"
    url: str


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(caller: Reader, services: Services, request: Request, session_id: PathId) -> TraceExport:
    """Return a link to the session's timeline, for an hour or until the key is revoked. Raises ``NotFound``."""
    address = public_address(request, services.runtime.settings)
    async with services.runtime.database.read() as session:
        found = await get_session(session, caller.reach, session_id)
        key, _ = await describe_key(session, caller.tenant, caller.key_id)
    claims = {"key": key.prefix, "session": found.id}
    secret = services.signer.sign(claims, purpose=_PURPOSE, lifetime=_LIFETIME)
    return TraceExport(url=f"{address}/api/v1/downloads/traces/{secret}")


@router.get("/downloads/traces/{secret}", response_class=Response)
async def download_trace(services: Services, request: Request, secret: PathId) -> Response:
    """Download the timeline behind a link, as it is now: the newest 2,000 operations that are recorded.

    Raises ``NotFound``, ``TooManyRequests``.
    """
    claims = services.signer.claims(secret, purpose=_PURPOSE)
    if claims is None:
        raise NotFound("this link has expired, or never was; ask for another")
    try:
        holder = await services.batched_reads.keys.principal(claims["key"])
        holder.check_not_blocked()
    except (Unauthenticated, Suspended):
        raise NotFound("the key that this link was made with is revoked, or its tenant is blocked") from None
    ask_for(holder.tenant)
    await services.admission.enter(holder.tenant, request.scope)
    now = services.runtime.clock()
    async with services.runtime.database.survey() as session:
        operations = await session_trace(session, holder.tenant, claims["session"])
    body = await services.admission.threads.run(holder.tenant, _trace, claims["session"], operations, now)
    return Response(body, media_type="application/json")


def _trace(session_id: str, operations: Sequence[TracedOperation], now: datetime) -> bytes:
    """Return the trace as JSON. A lane is a thread; its operations may overlap, so they are asynchronous slices."""
    threads = {lane: number for number, lane in enumerate(dict.fromkeys(one.lane for one in operations), start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"session {session_id}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
            for lane, number in threads.items()
        ),
    ]
    for one in operations:
        slice_ = {"name": one.kind, "cat": one.lane, "id": one.id, "pid": 1, "tid": threads[one.lane]}
        told = {"seq_id": str(one.seq_id), "state": one.state, "tokens": one.tokens, "error": one.error_code}
        events.append({**slice_, "ph": "b", "ts": _microseconds(one.created_at), "args": told})
        events.append({**slice_, "ph": "e", "ts": _microseconds(one.finished_at or now)})
    return orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _microseconds(time: datetime) -> int:
    return round(time.timestamp() * 1e6)
