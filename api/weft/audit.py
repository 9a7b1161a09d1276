"""``GET /audit``: the entries of the audit log that are about the caller's tenant."""

import asyncio
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from api.authentication import AuditReader
from api.long_lists import long_answer
from api.security_events import note_read
from api.services import Services
from api.wire.request_model import NO_NUL, UtcTime
from store.tables import AuditEntry
from tenants.audit_actions import Action
from tenants.audit_log import AuditFilter, read_entries, told_actor

router = APIRouter(tags=["audit"])

DEFAULT_ENTRIES = 100
MOST_ENTRIES = 5000
_STEP = 50
"""Entries that are read and encoded in one step, of some kilobytes each at most."""
_PAGE_BYTES = 4 * 2**20
"""Size from which on a page takes no further step: it is sent in one."""

Text = Annotated[str, Query(max_length=100, pattern=NO_NUL)]


class AuditInfo(BaseModel):
    """One thing that was done or refused.

    - ``actor``: first part of the key, ``operator``, ``another tenant``, or a part of weft. ``door``: ``key``, ``token``,
      ``link``, ``ui``, ``share``, ``cli``, ``admin`` or ``service``.
    - ``action``: ``<resource>_<action>``. ``before`` and ``after``: what has changed.
    - ``outcome``: ``done`` or ``refused``.
    """

    id: int
    at: datetime
    actor: str
    key_id: int | None
    role: str | None
    door: str
    action: str
    resource: str
    resource_id: str
    project_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: str | None
    trace_id: str | None
    outcome: str


class AuditPageBody(BaseModel):
    """Entries, newest first. ``next_cursor`` is that of the next page, null on the last one.

    A page of very large entries has fewer than asked for.
    """

    entries: list[AuditInfo]
    next_cursor: str | None


@router.get("/audit", response_model=AuditPageBody)
async def read_audit(
    caller: AuditReader,
    services: Services,
    request: Request,
    action: Annotated[list[Action] | None, Query()] = None,
    resource: Annotated[list[Text] | None, Query(max_length=50)] = None,
    key: Text | None = None,
    since: UtcTime | None = None,
    until: UtcTime | None = None,
    limit: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = DEFAULT_ENTRIES,
    cursor: Text | None = None,
    format: Literal["json", "ndjson"] = "json",
) -> Response:
    """Return a page of the audit log, newest first: of these actions or resources, by this key, from ``since`` to ``until``.

    With ``ndjson`` each entry is a line, and the next page's cursor is in the header ``x-next-cursor``. A key for some projects
    reads of these alone. Raises ``InvalidRequest`` for a wrong cursor.
    """
    note_read(request, caller, Action.AUDIT_READ)
    which = AuditFilter(owner=caller.reach, actions=action, resources=resource, key=key, since=since, until=until)
    encoded = _line if format == "ndjson" else _item
    parts: list[bytes] = []
    size = 0
    while True:
        page = await audit_page(services, which, most=min(_STEP, limit - len(parts)), cursor=cursor)
        added = [encoded(entry) for entry in page.entries]
        parts += added
        size += sum(map(len, added))
        cursor = page.next_cursor
        if cursor is None or len(parts) == limit or size >= _PAGE_BYTES:
            break
        # SQLite waits for nothing.
        await asyncio.sleep(0)
    if format == "ndjson":
        headers = {} if cursor is None else {"x-next-cursor": cursor}
        return Response(b"".join(parts), media_type="application/x-ndjson", headers=headers)
    return long_answer(entries=orjson.Fragment(b"[" + b",".join(parts) + b"]"), next_cursor=cursor)


async def audit_page(services: Services, which: AuditFilter, *, most: int, cursor: str | None) -> AuditPageBody:
    """Return at most ``most`` entries, a number that one step of the event loop can tell, from ``cursor`` on."""
    async with services.runtime.database.survey() as session:
        page = await read_entries(session, which, most=most, cursor=cursor)
    return AuditPageBody(entries=[_info(entry) for entry in page.entries], next_cursor=page.next)


def _info(entry: AuditEntry) -> AuditInfo:
    actor, key_id, address = told_actor(entry)
    return AuditInfo(
        id=entry.id,
        at=entry.at,
        actor=actor,
        key_id=key_id,
        role=entry.role,
        door=entry.door,
        action=entry.action,
        resource=entry.resource,
        resource_id=entry.resource_id,
        project_id=entry.project,
        before=entry.before,
        after=entry.after,
        address=address,
        trace_id=entry.trace_id,
        outcome=entry.outcome,
    )


def _item(entry: AuditInfo) -> bytes:
    return entry.model_dump_json().encode()


def _line(entry: AuditInfo) -> bytes:
    return orjson.dumps(entry.model_dump()) + b"\n"
