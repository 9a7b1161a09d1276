"""``GET /audit``: the entries of the audit log that are about the caller's tenant."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from api.authentication import AuditReader
from api.security_events import note_read
from api.services import Services
from api.wire.request_model import NO_NUL, UtcTime
from store.tables import AuditEntry
from tenants.audit_actions import Action
from tenants.audit_log import AuditFilter, read_entries, told_actor

router = APIRouter(tags=["audit"])

DEFAULT_ENTRIES = 100
MOST_ENTRIES = 5000

Text = Annotated[str, Query(max_length=100, pattern=NO_NUL)]


class AuditInfo(BaseModel):
    """One thing that was done or refused.

    - ``actor``: first part of the key, ``operator``, or a part of weft. ``door``: ``key``, ``token``, ``link``, ``cli``,
      ``admin`` or ``service``.
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
    """Entries, newest first. ``next_cursor`` is that of the next page, null on the last one."""

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
) -> AuditPageBody | Response:
    """Return a page of the audit log, newest first: of these actions or resources, by this key, from ``since`` to ``until``.

    With ``ndjson`` each entry is a line, and the next page's cursor is in the header ``x-next-cursor``. A key for some projects
    reads of these alone. Raises ``InvalidRequest`` for a wrong cursor.
    """
    note_read(request, caller, Action.AUDIT_READ)
    which = AuditFilter(owner=caller.reach, actions=action, resources=resource, key=key, since=since, until=until)
    async with services.runtime.database.read() as session:
        page = await read_entries(session, which, most=limit, cursor=cursor)
    entries = [_info(entry) for entry in page.entries]
    if format == "ndjson":
        headers = {} if page.next is None else {"x-next-cursor": page.next}
        return Response(_lines(entries), media_type="application/x-ndjson", headers=headers)
    return AuditPageBody(entries=entries, next_cursor=page.next)


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


def _lines(entries: Iterable[AuditInfo]) -> bytes:
    return b"".join(orjson.dumps(entry.model_dump()) + b"\n" for entry in entries)
