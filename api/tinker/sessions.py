"""Endpoints of SDK clients' sessions: create, keep alive, finish, describe and list."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, Field

from api.acting import record_act
from api.authentication import AnyKey, ProjectMover, Reader
from api.json_body import PathId, json_body
from api.long_lists import long_answer
from api.metadata import check_metadata
from api.paging import Page
from api.route_bounds import METADATA_BODY, bounded
from api.services import ApiServices, Services
from api.wire.request_model import ListOf, PlainJson, PlainText, RequestModel, text_values
from ledger.cancellation import OfSession, session_ended
from tenants import sessions
from tenants.audit_actions import Action
from tenants.projects import assign_project, project_of_new
from tenants.reach import default_project
from tenants.rights import Principal, Scope

router = APIRouter(tags=["sessions"])

_MAX_LABEL = 200
_MAX_DETAIL = 4000

Label = Annotated[PlainText, Field(max_length=_MAX_LABEL)]


class CreateSessionRequest(RequestModel):
    """A client's description of itself."""

    tags: ListOf[str] | None = None
    user_metadata: PlainJson[dict[str, Any]] | None = None
    sdk_version: PlainText | None = None
    project_id: Label | None = None
    display_name: PlainText | None = None


class SessionCreated(BaseModel):
    """Id of the new session."""

    session_id: str
    type: Literal["create_session"] = "create_session"


class AssignRequest(RequestModel):
    """Project that a session is moved to."""

    project_id: Label


class HeartbeatRequest(RequestModel):
    """Session whose client is alive."""

    session_id: PlainText


class HeartbeatNoted(BaseModel):
    """Confirmation of a heartbeat."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(RequestModel):
    """Reason for which a client closes: ``success``, ``errored`` or ``interrupted``."""

    type: Annotated[PlainText, Field(max_length=32)] = "success"


class FinishRequest(RequestModel):
    """Reason for the end of a session, with a text for people."""

    reason: FinishReason | None = None
    detail: PlainText | None = None


class SessionInfo(BaseModel):
    """A session's runs and samplers, in order of creation."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None
    project_id: str


class SessionList(BaseModel):
    """Ids of sessions, newest first."""

    sessions: list[str]


@router.post("/create_session")
@bounded(body=METADATA_BODY, is_counted=False)
async def create_session(
    caller: AnyKey,
    services: Services,
    body: Annotated[CreateSessionRequest, json_body(CreateSessionRequest)],
    x_idempotency_key: Annotated[str | None, Header()] = None,
) -> SessionCreated:
    """Open a session. A repeated request with the same ``X-Idempotency-Key`` finds the first one. A long display name is cut.

    ``project_id`` names one of the tenant's projects by its id or its name; null is the default project, or the project that
    the key is for. Raises ``Forbidden`` for a project that the key does not reach, ``InvalidRequest`` for too much metadata,
    and ``TooManySessions`` and ``OverRate``, on which the SDK sends the request again.
    """
    project, limits = await _project_of_new(services, caller, body.project_id), services.limits_of(caller)
    new = sessions.NewSession(
        tags=body.tags or [],
        user_metadata=body.user_metadata,
        sdk_version=body.sdk_version or "",
        project=project,
        display_name=None if body.display_name is None else body.display_name[:_MAX_LABEL],
        key_id=caller.key_id,
    )
    size = check_metadata(new.user_metadata, limits, "user_metadata") + check_metadata(new.tags, limits, "tags")
    services.admission.changes.count_metadata(caller.tenant, size)
    sessions.check_client_key(x_idempotency_key)
    async with services.runtime.database.write() as transaction:
        session_id = await sessions.create_limited_session(
            transaction,
            caller.tenant,
            new,
            services.runtime.clock,
            idempotency_key=x_idempotency_key,
            defaults=services.limits,
        )
    return SessionCreated(session_id=session_id)


async def _project_of_new(services: ApiServices, caller: Principal, named: str | None) -> str | None:
    """Return the project of a new session, as its row has it. Raises ``Forbidden``."""
    if not named:
        return caller.home_project
    async with services.runtime.database.read() as session:
        return await project_of_new(session, caller, named)


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_session_project(
    caller: ProjectMover,
    services: Services,
    session_id: PathId,
    body: Annotated[AssignRequest, json_body(AssignRequest)],
) -> None:
    """Move the session, with its runs and samplers, to a project, named by its id or its name.

    Raises ``NotFound`` for the session, ``Forbidden`` for the project, ``InvalidRequest`` for the session of OpenAI clients.
    A project is filled beyond its own limits by keys alone that may set them.
    """
    may_overfill = Scope.PROJECTS in caller.scopes and caller.projects is None
    async with services.runtime.database.write() as transaction:
        before, after = await assign_project(
            transaction, caller.reach, session_id, body.project_id, may_overfill=may_overfill
        )
        await record_act(
            transaction,
            services,
            caller,
            Action.SESSION_MOVE,
            session_id,
            project=after,
            before={"project": before},
            after={"project": after},
        )


@router.post("/session_heartbeat")
@bounded(is_counted=False)
async def session_heartbeat(
    caller: AnyKey, services: Services, body: Annotated[HeartbeatRequest, json_body(HeartbeatRequest)]
) -> HeartbeatNoted:
    """Keep the session alive. Raises ``NotFound``, ``Forbidden``, and ``HeartbeatRefused`` once the session has ended."""
    if not caller.may_work:
        async with services.runtime.database.read() as session:
            await sessions.check_may_act(session, caller, body.session_id)
    async with services.runtime.database.write_one() as session:
        await sessions.heartbeat(session, caller.reach, body.session_id, services.runtime.clock)
    return HeartbeatNoted()


@router.post("/sessions/{session_id}/finish", status_code=204)
@bounded(is_counted=False)
async def finish_session(
    caller: AnyKey,
    services: Services,
    session_id: PathId,
    body: Annotated[FinishRequest, json_body(FinishRequest)],
) -> None:
    """End the session, and cancel its samples that have not ended; the first reason stays.

    Raises ``NotFound`` and ``Forbidden``.
    """
    reason = body.reason or FinishReason()
    detail = None if body.detail is None else body.detail[:_MAX_DETAIL]
    async with services.runtime.database.write() as transaction:
        await sessions.check_may_act(transaction, caller, session_id)
        has_ended = await sessions.finish_session(
            transaction, caller.reach, session_id, reason=reason.type, detail=detail, clock=services.runtime.clock
        )
        if has_ended:
            told = {"reason": reason.type}
            await record_act(
                transaction, services, caller, Action.SESSION_END, session_id, session_id=session_id, after=told
            )
        await services.runtime.ledger.cancel(transaction, OfSession(session_id), session_ended(), only_samples=True)


@router.get("/sessions/{session_id}", response_model=SessionInfo)
async def get_session(caller: Reader, services: Services, session_id: PathId) -> Response:
    """Describe the session: its runs, its samplers and its metadata. Raises ``NotFound``."""
    async with services.runtime.database.survey() as session:
        found = await sessions.get_session(session, caller.reach, session_id)
        run_ids, sampler_ids = await sessions.session_members(session, caller.tenant, session_id)
    return long_answer(
        training_run_ids=run_ids,
        sampler_ids=sampler_ids,
        user_metadata=text_values(found.user_metadata),
        display_name=found.display_name,
        project_id=found.project or default_project(caller.tenant),
    )


@router.get("/sessions")
async def list_sessions(caller: Reader, services: Services, page: Page) -> SessionList:
    """List the caller's sessions, newest first."""
    async with services.runtime.database.survey() as session:
        ids = await sessions.list_sessions(session, caller.reach, limit=page.limit, offset=page.offset)
    return SessionList(sessions=ids)
