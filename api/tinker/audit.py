"""The audit log in the SDK's form: the entries of one day of UTC."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from api.authentication import AuditReader
from api.endable_response import EndableResponse
from api.security_events import note_read
from api.services import ApiServices, Services
from api.wire.request_model import UtcDay
from store.tables import AuditEntry
from tenants.audit_actions import Action
from tenants.audit_log import AuditFilter, AuditPage, read_entries, told_actor

router = APIRouter(tags=["audit"])

_PAGE = 50
"""Entries that are read and written at once: the answer has a day whole, however many there are."""
_RESOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"checkpoints": ("checkpoint",), "projects": ("project",), "teams": (), "organizations": ("tenant", "key")}
)
"""Resources of each type of events. weft has no teams."""
_CHECKPOINT = "checkpoint"

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditEvent(BaseModel):
    """An entry. ``model_id``, ``tinker_path`` and ``purpose`` are those of a checkpoint."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLog(BaseModel):
    """Entries of a day, oldest first."""

    entries: list[AuditEvent]


@router.get("/audit", response_model=AuditLog, response_class=StreamingResponse)
async def read_day(
    caller: AuditReader,
    services: Services,
    request: Request,
    event_type: EventType = "all",
    day: UtcDay | None = None,
) -> Response:
    """Return the entries of a day, midnight to midnight UTC, by default of today."""
    note_read(request, caller, Action.AUDIT_READ)
    wanted = day or services.runtime.clock().astimezone(UTC).date()
    since = datetime(wanted.year, wanted.month, wanted.day, tzinfo=UTC)
    which = AuditFilter(
        owner=caller.reach, resources=_RESOURCES.get(event_type), since=since, until=since + timedelta(days=1)
    )
    first = await _page(services, which, None)
    entries = StreamingResponse(_body(services, which, first), media_type="application/json")
    return EndableResponse(entries, services.ended_keys.of(caller.tenant, caller.key_id))


async def _page(services: ApiServices, which: AuditFilter, cursor: str | None) -> AuditPage:
    # No connection is held while the client reads.
    async with services.runtime.database.survey() as session:
        return await read_entries(session, which, most=_PAGE, cursor=cursor, oldest_first=True)


async def _body(services: ApiServices, which: AuditFilter, page: AuditPage) -> AsyncIterator[bytes]:
    yield b'{"entries":['
    is_first = True
    while page.entries:
        events = b",".join(orjson.dumps(_event(entry).model_dump()) for entry in page.entries)
        yield events if is_first else b"," + events
        is_first = False
        if page.next is None:
            break
        # SQLite waits for nothing.
        await asyncio.sleep(0)
        page = await _page(services, which, page.next)
    yield b"]}"


def _event(entry: AuditEntry) -> AuditEvent:
    actor, key_id, address = told_actor(entry)
    details = {
        "actor": actor,
        "key_id": key_id,
        "role": entry.role,
        "door": entry.door,
        "resource_id": entry.resource_id,
        "project_id": entry.project,
        "before": entry.before,
        "after": entry.after,
        "address": address,
        "trace_id": entry.trace_id,
        "outcome": entry.outcome,
    }
    event = AuditEvent(timestamp=entry.at, event=entry.action, event_details=details)
    if entry.resource == _CHECKPOINT:
        event.tinker_path = entry.resource_id
        event.model_id = entry.resource_id.removeprefix("tinker://").partition("/")[0]
        told = entry.after or {}
        event.purpose = told.get("purpose") or (told.get("cause") if entry.action == Action.CHECKPOINT_READ else None)
    return event
