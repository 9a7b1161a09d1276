"""Search of sessions by what the SDK's ``search_sessions`` asks for."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, and_, case, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest
from store.tables import ApiKey, Checkpoint, Run, Session
from tenants.reach import Owner, default_project, reached_sessions, tenant_of

FINISH_REASONS = ("success", "errored", "interrupted")
"""Reasons with which clients finish their sessions."""
SEARCHED = 10_000
"""Sessions of a page that are searched at most."""
PIECE = 250
"""Sessions searched by one statement. SQLite's statements run on the event loop, and no index has what metadata says."""

Place = tuple[datetime, str]
"""Time and id of the session behind which a page begins."""


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
    after: Place | None
    limit: int


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session with the first part of the key that opened it, and its named checkpoints added up."""

    row: Session
    key_prefix: str | None
    project: str
    checkpoints: int
    checkpoint_bytes: int


async def search_sessions(
    session: AsyncSession, owner: Owner, query: SessionQuery
) -> tuple[list[FoundSession], Place | None]:
    """Return a page of the owner's sessions, newest first, and the place behind which the next page begins, if there is one.

    A page may be shorter than the query's limit and still have a next one. Raises ``InvalidRequest``.
    """
    rows, end = await _searched(session, reached_sessions(owner), _conditions(session, query), query)
    page = rows[: query.limit]
    if len(rows) > query.limit:
        last = page[-1][0]
        end = last.created_at, last.id
    stored = await _stored(session, [row[0].id for row in page])
    default = default_project(tenant_of(owner))
    sessions = [FoundSession(row, prefix, row.project or default, *stored.get(row.id, (0, 0))) for row, prefix in page]
    return sessions, end


async def _searched(
    session: AsyncSession,
    reached: Sequence[ColumnElement[bool]],
    sought: Sequence[ColumnElement[bool]],
    query: SessionQuery,
) -> tuple[list[Any], Place | None]:
    """Return the sessions that the search finds, one more than a page at most, and where it stopped; None at the end."""
    order = Session.created_at.desc(), Session.id
    keys = select(Session.created_at, Session.id).order_by(*order)
    found = select(Session, ApiKey.prefix).outerjoin(ApiKey, ApiKey.id == Session.key_id).order_by(*order)
    if query.session_id is not None and query.display_name is None:
        return list((await session.execute(found.where(*reached, *_behind(query.after), *sought))).all()), None
    rows: list[Any] = []
    place = query.after
    for _ in range(SEARCHED // PIECE):
        piece = [*reached, *_behind(place)]
        last = (await session.execute(keys.where(*piece).offset(PIECE - 1).limit(1))).one_or_none()
        if last is not None:
            piece += _up_to((last.created_at, last.id))
        most = query.limit + 1 - len(rows)
        rows += (await session.execute(found.where(*piece, *sought).limit(most))).all()
        place = None if last is None else (last.created_at, last.id)
        if place is None or len(rows) > query.limit:
            break
        # Other requests have their turn: a statement of SQLite gives none.
        await asyncio.sleep(0)
    return rows, place


def _behind(place: Place | None) -> list[ColumnElement[bool]]:
    """Return the conditions on sessions behind the place: older ones, and those of the same time with a higher id."""
    if place is None:
        return []
    created, last = place
    # The first alone is a range of the index.
    return [Session.created_at <= created, or_(Session.created_at < created, Session.id > last)]


def _up_to(place: Place) -> list[ColumnElement[bool]]:
    created, last = place
    return [Session.created_at >= created, or_(Session.created_at > created, Session.id <= last)]


def _conditions(session: AsyncSession, query: SessionQuery) -> list[ColumnElement[bool]]:
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
        conditions.append(_metadata_text(session, key) == value)
    if query.key_prefixes is not None:
        conditions.append(ApiKey.prefix.in_(query.key_prefixes))
    if query.statuses is not None:
        conditions.append(or_(*(_has(status) for status in query.statuses)))
    return conditions


def _metadata_text(session: AsyncSession, key: str) -> ColumnElement[str]:
    """Return a value of a session's metadata as the API shows it. ``key`` has neither quotation marks nor backslashes."""
    text: ColumnElement[str] = Session.user_metadata[key].as_string()
    if session.get_bind().dialect.name != "sqlite":
        return text
    # SQLite takes true for 1.
    kind = func.json_type(Session.user_metadata, f'$."{key}"')
    return case((kind.in_(("true", "false")), kind), else_=text)


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
