"""Endpoint that searches sessions, as the SDK's experimental ``search_sessions`` asks for them."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.authentication import Reader
from api.json_body import json_body
from api.route_bounds import bounded
from api.services import Services
from api.wire.request_model import BodyPart, DefaultingModel, PlainText, UtcTime, text_values
from store.tables import Session
from tenants.projects import find_projects
from tenants.reach import Reach
from tenants.session_search import FINISH_REASONS, FoundSession, SessionQuery, SessionStatus, search_sessions

router = APIRouter(tags=["sessions"])

_KEY_URN = "tml:key:"


class SearchOwner(BodyPart):
    """Parties whose sessions to search. ``user`` names keys, as ``whoami`` names them; others mean the whole tenant."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[PlainText], Field(min_length=1, max_length=10)] | None = None


class StatusQuery(BodyPart):
    """Status of the sessions to search."""

    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Literal["success", "errored", "interrupted"]], Field(min_length=1, max_length=3)] | None = (
        None
    )


class SearchCursor(BodyPart):
    """Place where the next page begins."""

    last_created_at: UtcTime
    last_session_id: PlainText


class SearchRequest(DefaultingModel):
    """Filters of a search, its page size and its cursor."""

    session_id: PlainText | None = None
    project_ids: Annotated[list[PlainText], Field(max_length=100)] | None = None
    user_metadata: Annotated[dict[PlainText, PlainText], Field(max_length=50)] = {}
    display_name: Annotated[PlainText, Field(min_length=1, max_length=200)] | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1, max_length=20)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class SessionSummary(BaseModel):
    """A session. ``status`` is null for one that ended without its client's word."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: dict[str, Any] | None
    checkpoints_count: int
    display_name: str | None
    user_metadata: dict[str, str] | None
    checkpoint_storage_bytes: int


class NextPage(BaseModel):
    """Cursor of the next page."""

    last_created_at: datetime
    last_session_id: str


class SearchResult(BaseModel):
    """A page of sessions, newest first."""

    sessions: list[SessionSummary]
    next_cursor: NextPage | None


@router.post("/sessions/search")
@bounded(goes_on=True)
async def search(
    caller: Reader, services: Services, body: Annotated[SearchRequest, json_body(SearchRequest)]
) -> SearchResult:
    """Search the caller's sessions. Raises ``Forbidden`` for a project that the key does not reach, ``InvalidRequest``."""
    async with services.runtime.database.survey() as session:
        owner = caller.reach
        if body.project_ids is not None:
            owner = Reach(caller.tenant, await find_projects(session, caller.reach, body.project_ids))
        found, end = await search_sessions(session, owner, _query(body))
    return SearchResult(
        sessions=[_summary(one) for one in found],
        next_cursor=None if end is None else NextPage(last_created_at=end[0], last_session_id=end[1]),
    )


def _query(body: SearchRequest) -> SessionQuery:
    keys = None
    if body.owner.type == "user":
        keys = tuple(urn.removeprefix(_KEY_URN) for urn in body.owner.owner_urns or ())
    statuses = None
    if body.statuses is not None:
        statuses = tuple(
            SessionStatus(one.type, None if one.reasons is None else tuple(one.reasons)) for one in body.statuses
        )
    return SessionQuery(
        session_id=body.session_id,
        display_name=body.display_name,
        user_metadata=body.user_metadata,
        key_prefixes=keys,
        statuses=statuses,
        after=None if body.cursor is None else (body.cursor.last_created_at, body.cursor.last_session_id),
        limit=body.limit,
    )


def _summary(found: FoundSession) -> SessionSummary:
    row = found.row
    return SessionSummary(
        session_id=row.id,
        created_at=row.created_at,
        owner=_KEY_URN + (found.key_prefix or "unknown"),
        project_id=found.project,
        status=_status(row),
        checkpoints_count=found.checkpoints,
        display_name=row.display_name,
        user_metadata=text_values(row.user_metadata),
        checkpoint_storage_bytes=found.checkpoint_bytes,
    )


def _status(row: Session) -> dict[str, Any] | None:
    if row.ended_at is None:
        return {"type": "active"}
    if row.end_reason in FINISH_REASONS:
        return {"type": "client_finished", "reason": {"type": row.end_reason}, "detail": row.end_detail}
    return None
