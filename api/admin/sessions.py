"""Clients' sessions for operators: list, show and end them."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, PathId, QueryText, ReasonBody, listed, operator_body
from api.admin.repeats import Once
from api.admin.services import Admin, AdminServices, Caller
from api.long_lists import long_answer
from contracts.errors import Cancelled, NotFound
from contracts.ids import TenantId
from ledger.cancellation import OfSession
from store.tables import Session
from tenants.audit_actions import Action
from tenants.operator_keys import Operator
from tenants.pages import page_of
from tenants.sessions import finish_session, session_members

router = APIRouter(tags=["sessions"])


class SessionBody(BaseModel):
    """A client's session. ``ended_at`` is null while it is open."""

    id: str
    tenant_id: str
    project: str | None
    key_id: int | None
    sdk_version: str
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    end_detail: str | None


class SessionDetails(SessionBody):
    """A session with the ids of its runs and samplers."""

    runs: list[str]
    samplers: list[str]


class EndedSession(BaseModel):
    """A session that was ended, and how many operations that has cancelled."""

    id: str
    cancelled: int


@router.get("/sessions")
async def list_sessions(
    caller: Caller,
    admin: Admin,
    tenant_id: QueryText = None,
    is_open: bool | None = None,
    after: After = None,
    limit: Limit = 50,
) -> Listed[SessionBody]:
    """List sessions: of a tenant, or of all; open or ended ones."""
    del caller
    conditions = [] if tenant_id is None else [Session.tenant_id == tenant_id]
    if is_open is not None:
        conditions.append(Session.ended_at.is_(None) if is_open else Session.ended_at.is_not(None))
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Session, *conditions, after=after, most=limit + 1)
    bodies = [SessionBody.model_validate(row, from_attributes=True) for row in rows]
    return listed(bodies, limit, [row.id for row in rows])


@router.get("/sessions/{session_id}", response_model=SessionDetails)
async def show_session(caller: Caller, admin: Admin, session_id: PathId) -> Response:
    """Show a session with its runs and samplers. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        found = await session.get(Session, session_id)
        if found is None:
            raise _no_session(session_id)
        runs, samplers = await session_members(session, TenantId(found.tenant_id), found.id)
        shown = SessionBody.model_validate(found, from_attributes=True)
    return long_answer(**shown.model_dump(mode="json"), runs=runs, samplers=samplers)


@router.post("/sessions/{session_id}/end")
async def end_session(
    caller: Caller,
    admin: Admin,
    request: Request,
    session_id: PathId,
    body: Annotated[ReasonBody, operator_body(ReasonBody)],
    repeats: Once,
) -> EndedSession:
    """End a session: its client is told to stop, and what it has pending is cancelled. Checkpoints stay. Raises ``NotFound``.

    A repeat with the same ``Idempotency-Key`` is answered like the first, and changes nothing.
    """
    async with admin.runtime.database.write() as transaction:

        async def make() -> EndedSession:
            return await _end(transaction, admin, request, caller, session_id, body.reason)

        return await repeats.once(transaction, body, EndedSession, make)


async def _end(
    transaction: AsyncSession, admin: AdminServices, request: Request, caller: Operator, session_id: str, reason: str
) -> EndedSession:
    found = await transaction.get(Session, session_id)
    if found is None:
        raise _no_session(session_id)
    has_ended = await finish_session(
        transaction,
        TenantId(found.tenant_id),
        session_id,
        reason="ended_by_operator",
        detail=reason or None,
        clock=admin.runtime.clock,
    )
    if has_ended:
        told = {"reason": reason or None}
        await record_operator(
            transaction,
            admin,
            request,
            caller,
            Action.SESSION_END,
            session_id,
            tenant=found.tenant_id,
            session_id=session_id,
            after=told,
        )
    why = f"cancelled: the service's operator has ended the session{f': {reason}' if reason else ''}"
    ended = await admin.runtime.ledger.cancel(transaction, OfSession(session_id), Cancelled(why))
    return EndedSession(id=session_id, cancelled=len(ended))


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id[:100]!r}; a run's id begins with its session's")
