"""Sessions of SDK clients: opened, kept alive by heartbeats, and ended."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import uuid4

from sqlalchemy import ColumnElement, Row, Table, bindparam, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Forbidden, HeartbeatRefused, InvalidRequest, NotFound, SessionEnded, TooManySessions
from contracts.ids import SessionId, TenantId
from contracts.webhooks import EventKind
from store.clock import Clock
from store.inserts import insert_unless_present
from store.tables import Project, Run, Sampler, Session
from tenants.forced_silence import were_answered
from tenants.limit_use import SESSION_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.project_limits import use_of_project
from tenants.reach import Owner, Reach, default_project, includes, reached_sessions, tenant_of
from tenants.rights import Principal
from tenants.webhook_events import TenantEvent, record_events

TIMED_OUT = "timed_out"
"""Reason of the end of a session whose heartbeats stopped."""
_OWN_KEYS = ("standing/", "import/", "copy/")
"""Beginnings of the keys under which the service opens sessions of its own."""
_MEMBERS_AT_ONCE = 2000
"""Samplers that one statement reads: a session may have tens of thousands."""
IS_OWN_SESSION = Session.key_id.is_(None) & (Session.sdk_version == "")
"""Condition on sessions of the service's own, which serve clients that open none."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """A client's description of itself."""

    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project: str | None
    """Id of the session's project; None: the tenant's default project."""
    display_name: str | None
    key_id: int | None = None
    """API key that the session is opened with; None for a session of the service's own."""


_sessions = cast(Table, Session.__table__)
_projects = cast(Table, Project.__table__)
_BEAT = (
    update(_sessions)
    .where(
        _sessions.c.id == bindparam("session_id"),
        _sessions.c.tenant_id == bindparam("tenant"),
        _sessions.c.ended_at.is_(None),
    )
    .values(last_seen_at=bindparam("now"), heartbeat_at=bindparam("now"))
    .returning(_sessions.c.id)
)

# Built once: every new model and sampler begins with this query.
_STANDING = (
    select(
        _sessions.c.id,
        _sessions.c.project,
        _sessions.c.end_reason,
        _projects.c.name.label("project_name"),
        _projects.c.limits.label("project_limits"),
    )
    .outerjoin_from(_sessions, _projects, _projects.c.id == _sessions.c.project)
    .where(_sessions.c.id == bindparam("session_id"), _sessions.c.tenant_id == bindparam("tenant"))
)


async def create_session(
    transaction: AsyncSession, tenant: TenantId, new: NewSession, clock: Clock, *, idempotency_key: str | None = None
) -> SessionId:
    """Open a session. If the SDK repeats the request with the same ``idempotency_key``, return the tenant's first session."""
    now = clock()
    session_id = uuid4().hex if idempotency_key is None else derived_session_id(tenant, idempotency_key)
    values = {
        "id": session_id,
        "tenant_id": tenant,
        "tags": new.tags,
        "user_metadata": new.user_metadata,
        "sdk_version": new.sdk_version[:64],
        "project": new.project,
        "key_id": new.key_id,
        "display_name": new.display_name,
        "created_at": now,
        "last_seen_at": now,
    }
    await transaction.execute(insert_unless_present(transaction, Session).values(values))
    return SessionId(session_id)


async def create_limited_session(
    transaction: AsyncSession,
    tenant: TenantId,
    new: NewSession,
    clock: Clock,
    *,
    idempotency_key: str | None,
    defaults: Limits,
) -> SessionId:
    """Open a session as ``create_session``, within the tenant's limit. Raises ``TooManySessions``."""
    await hold_count(transaction, Counted.SESSIONS, [tenant])
    use = await SESSION_USE.of(transaction, tenant, defaults)
    if use.room("sessions") < 1:
        earlier = None if idempotency_key is None else SessionId(derived_session_id(tenant, idempotency_key))
        if earlier is not None and await transaction.get(Session, earlier) is not None:
            return earlier
        raise TooManySessions(
            f"{use.used['sessions']} sessions are open, and your limit is {use.limits.sessions}; close one, or wait until a "
            "silent one is ended"
        )
    project = await use_of_project(transaction, tenant, new.project, ["sessions"])
    if project is not None and not project.has_room("sessions"):
        earlier = None if idempotency_key is None else SessionId(derived_session_id(tenant, idempotency_key))
        if earlier is not None and await transaction.get(Session, earlier) is not None:
            return earlier
        raise TooManySessions(
            f"{project.used['sessions']} sessions are open in project {project.name!r}, and its limit is "
            f"{project.limits['sessions']}; close one, or wait until a silent one is ended"
        )
    return await create_session(transaction, tenant, new, clock, idempotency_key=idempotency_key)


async def standing_session(
    transaction: AsyncSession, tenant: TenantId, name: str, clock: Clock, *, project: str | None = None
) -> SessionId:
    """Return the tenant's session ``name`` of a project, created or reopened as needed.

    Such a session serves clients that open none.
    """
    new = NewSession([name], None, sdk_version="", project=project, display_name=name)
    key = _standing_key(name, project)
    session_id = await create_session(transaction, tenant, new, clock, idempotency_key=key)
    await transaction.execute(
        update(Session)
        .where(Session.id == session_id)
        .values(last_seen_at=clock(), ended_at=None, end_reason=None, end_detail=None)
    )
    return session_id


def check_client_key(idempotency_key: str | None) -> None:
    """Raise ``InvalidRequest`` for a client's key that could name one of the service's own sessions."""
    if idempotency_key is not None and idempotency_key.startswith(_OWN_KEYS):
        raise InvalidRequest(f"X-Idempotency-Key must not begin with {' or '.join(_OWN_KEYS)}; send another one")


def standing_session_id(tenant: TenantId, name: str, project: str | None = None) -> SessionId:
    """Return the id of ``standing_session``."""
    return SessionId(derived_session_id(tenant, _standing_key(name, project)))


def is_standing(session: Session) -> bool:
    """Return whether the session is a ``standing_session``, whose id comes from its name and its project."""
    name, tenant = session.display_name, TenantId(session.tenant_id)
    return name is not None and session.id == standing_session_id(tenant, name, session.project)


def _standing_key(name: str, project: str | None) -> str:
    return f"standing/{name}" if project is None else f"standing/{name}/{project}"


def derived_session_id(tenant: TenantId, idempotency_key: str) -> str:
    """Return the id of the session that the tenant opens under the key."""
    return hashlib.blake2b(f"{tenant}\0{idempotency_key}".encode(), digest_size=16).hexdigest()


async def get_session(session: AsyncSession, owner: Owner, session_id: str) -> Session:
    """Return the owner's session. Raises ``NotFound``."""
    found = await session.scalar(select(Session).where(Session.id == session_id, *reached_sessions(owner)))
    if found is None:
        raise _missing(session_id)
    return found


def _missing(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id[:100]!r}")


@dataclass(frozen=True, slots=True)
class SessionStanding:
    """State of a session, as far as new work in it needs it."""

    id: SessionId
    project: str
    end_reason: str | None
    """Reason of the session's end, None while it is open."""
    project_name: str | None = None
    project_limits: Mapping[str, int] | None = None
    """Limits that the project has of its own."""

    def check_open(self) -> None:
        """Raise ``SessionEnded`` once the session has ended."""
        if self.end_reason is not None:
            raise SessionEnded(f"session {self.id} has ended ({self.end_reason}); open a new one")


async def session_standing(session: AsyncSession, owner: Owner, session_id: str) -> SessionStanding:
    """Return the state of the owner's session. Raises ``NotFound``."""
    tenant = tenant_of(owner)
    keys = {"session_id": session_id, "tenant": tenant}
    row = (await session.execute(_STANDING, keys)).one_or_none()
    if row is None or not includes(owner, row.project):
        raise _missing(session_id)
    project = row.project or default_project(tenant)
    return SessionStanding(SessionId(row.id), project, row.end_reason, row.project_name, row.project_limits)


async def live_session(session: AsyncSession, owner: Owner, session_id: str) -> SessionStanding:
    """Return the state of the owner's session. Raises ``NotFound``, and ``SessionEnded`` once it has ended."""
    found = await session_standing(session, owner, session_id)
    found.check_open()
    return found


def acted_on(caller: Principal) -> list[ColumnElement[bool]]:
    """Return the conditions under which the caller may act on rows of ``sessions``: those it reaches.

    A key that may neither train nor sample acts only on those that it has opened: others are of work that it may not do.
    """
    opened = [] if caller.may_work else [Session.key_id == caller.key_id]
    return [*reached_sessions(caller.reach), *opened]


async def check_may_act(session: AsyncSession, caller: Principal, session_id: str) -> None:
    """Raise ``Forbidden`` unless the caller may act on the session, ``NotFound`` for one that it does not reach."""
    if caller.may_work:
        return
    if (await get_session(session, caller.reach, session_id)).key_id != caller.key_id:
        raise Forbidden(f"your key of role {caller.role} may act only on sessions that it has opened itself")


async def heartbeat(session: AsyncSession, owner: Owner, session_id: str, clock: Clock) -> None:
    """Record the client's heartbeat, in one statement for a whole tenant. Raises ``NotFound``, ``HeartbeatRefused``."""
    if isinstance(owner, Reach):
        await get_session(session, owner, session_id)
    beat = await session.execute(_BEAT, {"session_id": session_id, "tenant": tenant_of(owner), "now": clock()})
    if beat.first() is None:
        found = await get_session(session, owner, session_id)
        raise HeartbeatRefused(f"session {found.id} has ended ({found.end_reason})")


async def keep_session_alive(session: AsyncSession, sampler: str, clock: Clock) -> None:
    """Record, in one statement, that a client of the sampler's session is there. An ended session stays ended."""
    of_sampler = select(Sampler.session_id).where(Sampler.id == sampler).scalar_subquery()
    await session.execute(
        update(Session)
        .where(Session.id == of_sampler, Session.ended_at.is_(None))
        .values(last_seen_at=clock())
        .execution_options(synchronize_session=False)
    )


async def finish_session(
    transaction: AsyncSession, owner: Owner, session_id: str, *, reason: str, detail: str | None, clock: Clock
) -> bool:
    """End a session; return False if it has ended already, with the first reason. Raises ``NotFound``."""
    found = await get_session(transaction, owner, session_id)
    # The statement itself checks ``ended_at``: two concurrent calls may both have read the session as open.
    ended = (
        update(Session)
        .where(Session.id == found.id, Session.ended_at.is_(None))
        .values(ended_at=clock(), end_reason=reason[:32], end_detail=detail)
        .returning(Session.id)
    )
    return await transaction.scalar(ended.execution_options(synchronize_session=False)) is not None


async def end_silent_sessions(transaction: AsyncSession, *, silent_since: datetime, now: datetime, most: int) -> int:
    """End at most ``most`` sessions without a heartbeat or training request since ``silent_since``; return how many."""
    trained = select(Run.id).where(Run.session_id == Session.id, Run.last_request_at >= silent_since)
    silent = (
        select(Session.id)
        .where(
            Session.ended_at.is_(None),
            Session.last_seen_at < silent_since,
            ~trained.exists(),
            were_answered(Session.tenant_id, silent_since),
        )
        .order_by(Session.last_seen_at)
        .limit(most)
    )
    ended = await transaction.execute(
        update(Session)
        # Asked again: a heartbeat may have come between the two reads of the row.
        .where(Session.id.in_(silent), Session.ended_at.is_(None), Session.last_seen_at < silent_since)
        .values(ended_at=now, end_reason=TIMED_OUT)
        # The columns of ``IS_OWN_SESSION``: SQLite 3.40 takes no NULL for one in an expression of RETURNING.
        .returning(
            Session.id, Session.tenant_id, Session.project, Session.last_seen_at, Session.key_id, Session.sdk_version
        )
        .execution_options(synchronize_session=False)
    )
    rows = ended.all()
    # A client that opens no session sends no heartbeats: its standing one is not lost, and is open again when it comes.
    lost = [_lost(row) for row in rows if row.key_id is not None or row.sdk_version]
    await record_events(transaction, lost, now)
    return len(rows)


def _lost(row: Row[*tuple[Any, ...]]) -> TenantEvent:
    """Return the event about a session that was ended for its silence."""
    tenant = TenantId(row.tenant_id)
    told = {
        "session_id": row.id,
        "project_id": row.project or default_project(tenant),
        "last_seen_at": row.last_seen_at,
    }
    return TenantEvent(tenant, EventKind.SESSION_LOST, row.id, told)


async def list_lost_sessions(
    session: AsyncSession,
    owner: Owner,
    *,
    session_id: str | None = None,
    since: datetime | None = None,
    most: int,
) -> Sequence[Session]:
    """Return the sessions of the owner's clients that were ended for their silence, the last ended first.

    Only those that ended from ``since`` on, if it is given, and the one with that id.
    """
    # A literal: SQLite takes a partial index for no parameter.
    is_lost = Session.end_reason == literal_column(f"'{TIMED_OUT}'")
    query = select(Session).where(*reached_sessions(owner), is_lost, ~IS_OWN_SESSION)
    if since is not None:
        query = query.where(Session.ended_at >= since)
    if session_id is not None:
        query = query.where(Session.id == session_id)
    return (await session.scalars(query.order_by(Session.ended_at.desc(), Session.id).limit(most))).all()


async def list_sessions(session: AsyncSession, owner: Owner, *, limit: int, offset: int) -> list[str]:
    """Return a page of the owner's session ids, newest first."""
    query = select(Session.id).where(*reached_sessions(owner)).order_by(Session.created_at.desc(), Session.id)
    return list(await session.scalars(query.limit(limit).offset(offset)))


async def session_members(session: AsyncSession, tenant: TenantId, session_id: str) -> tuple[list[str], list[str]]:
    """Return the session's run ids and sampler ids, each in order of creation. Other tasks have turns meanwhile."""
    runs = await session.scalars(
        select(Run.id).where(Run.tenant_id == tenant, Run.session_id == session_id).order_by(Run.model_seq_id)
    )
    samplers: list[str] = []
    after: int | None = None
    while True:
        page = (
            select(Sampler.id, Sampler.sampling_session_seq_id)
            .where(Sampler.tenant_id == tenant, Sampler.session_id == session_id)
            .order_by(Sampler.sampling_session_seq_id)
            .limit(_MEMBERS_AT_ONCE)
        )
        rows = (
            await session.execute(page if after is None else page.where(Sampler.sampling_session_seq_id > after))
        ).all()
        samplers += [row.id for row in rows]
        if len(rows) < _MEMBERS_AT_ONCE:
            return list(runs), samplers
        after = rows[-1].sampling_session_seq_id
        # SQLite waits for nothing.
        await asyncio.sleep(0)
