"""Search of sessions by what the SDK's ``search_sessions`` asks for."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from store.tables import ApiKey, Checkpoint, Run, Session
from tenants.reach import Owner, default_project, reached_sessions, tenant_of

FINISH_REASONS = ("success", "errored", "interrupted")
"""Reasons with which clients finish their sessions."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Status that a session may have: ``active``, or ``client_finished`` for one of ``reasons`` (None: any)."""

    type: str
    reasons: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Sessions that are looked for.

    A session of ``session_id`` matches, and one whose display name has every word of ``display_name``: either, if both are
    given. ``key_prefixes``: keys that opened the session; None: any. ``after``: last session of the page before.
    """

    session_id: str | None
    display_name: str | None
    user_metadata: dict[str, str]
    key_prefixes: tuple[str, ...] | None
    statuses: tuple[SessionStatus, ...] | None
    after: tuple[datetime, str] | None
    limit: int


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session with the first part of the key that opened it, and its named checkpoints added up."""

    row: Session
    key_prefix: str | None
    project: str
    checkpoints: int
    checkpoint_bytes: int


async def search_sessions(session: AsyncSession, owner: Owner, query: SessionQuery) -> tuple[list[FoundSession], bool]:
    """Return a page of the owner's sessions, newest first, and whether there are more. Raises ``InvalidRequest``."""
    found = (
        select(Session, ApiKey.prefix)
        .outerjoin(ApiKey, ApiKey.id == Session.key_id)
        .where(*reached_sessions(owner), *_conditions(query))
        .order_by(Session.created_at.desc(), Session.id)
        .limit(query.limit + 1)
    )
    rows = (await session.execute(found)).all()
    page = rows[: query.limit]
    stored = await _stored(session, [row[0].id for row in page])
    default = default_project(tenant_of(owner))
    sessions = [FoundSession(row, prefix, row.project or default, *stored.get(row.id, (0, 0))) for row, prefix in page]
    return sessions, len(rows) > query.limit


def _conditions(query: SessionQuery) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    named: list[ColumnElement[bool]] = []
    if query.session_id is not None:
        named.append(Session.id == query.session_id)
    if query.display_name is not None:
        words = [word.lower() for word in query.display_name.split()]
        lowered = func.lower(Session.display_name)
        named.append(
            and_(Session.display_name.is_not(None), *(lowered.contains(word, autoescape=True) for word in words))
        )
    if named:
        conditions.append(or_(*named))
    for key, value in query.user_metadata.items():
        if '"' in key or "\\" in key:
            raise InvalidRequest("user_metadata: a name with a quotation mark or a backslash cannot be searched for")
        conditions.append(Session.user_metadata[key].as_string() == value)
    if query.key_prefixes is not None:
        conditions.append(ApiKey.prefix.in_(query.key_prefixes))
    if query.statuses is not None:
        conditions.append(or_(*(_has(status) for status in query.statuses)))
    if query.after is not None:
        created, last = query.after
        conditions.append(or_(Session.created_at < created, and_(Session.created_at == created, Session.id > last)))
    return conditions


def _has(status: SessionStatus) -> ColumnElement[bool]:
    match status.type:
        case "active":
            return Session.ended_at.is_(None)
        case "client_finished":
            return Session.end_reason.in_(status.reasons or FINISH_REASONS)
    # A session is neither failed nor cancelled here.
    return false()


async def _stored(session: AsyncSession, ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return number and bytes of the sessions' named checkpoints."""
    added = (
        select(Run.session_id, func.count(), func.sum(Checkpoint.size_bytes))
        .join(Checkpoint, Checkpoint.run_id == Run.id)
        .where(Run.session_id.in_(ids), Checkpoint.listed.is_(True))
        .group_by(Run.session_id)
    )
    return {row[0]: (row[1], int(row[2])) for row in await session.execute(added)} if ids else {}
