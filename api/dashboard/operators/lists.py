"""Pages of runs, one run, and clients' sessions."""

from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response

from api.admin.bodies import PathId, QueryText, ReasonBody
from api.admin.repeats import Repeats
from api.admin.runs import MoveRequest, Outcome, evict_run, list_runs, move_run, show_run
from api.admin.services import Admin, AdminServices
from api.admin.sessions import end_session, list_sessions
from api.dashboard.form_values import body_of, trimmed
from api.dashboard.forms import see
from api.dashboard.operators.forms import FormFields, given_reason
from api.dashboard.operators.names import names_of, tenant_id_of
from api.dashboard.operators.rendering import OPS, operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED
from contracts.errors import InvalidRequest, WeftError
from tenants.operator_keys import Operator

router = APIRouter()

_A_PAGE = 50
_EVENTS = 50


@router.get("/runs")
async def runs_page(
    operator: PageOperator,
    admin: Admin,
    request: Request,
    tenant_id: QueryText = None,
    trainer: QueryText = None,
    after: QueryText = None,
) -> Response:
    """List runs: of all, of a tenant or of a trainer."""
    found = await list_runs(
        operator,
        admin,
        tenant_id=await tenant_id_of(admin, tenant_id),
        trainer=trainer or None,
        after=after,
        limit=_A_PAGE,
    )
    return operator_page(
        request,
        operator,
        "operators/runs.html",
        runs=found.items,
        next=found.next,
        after=after,
        asked={"tenant_id": tenant_id or "", "trainer": trainer or ""},
        names=await names_of(admin, (one.tenant_id for one in found.items)),
    )


@router.get("/runs/{run_id}")
async def run_page(operator: PageOperator, admin: Admin, request: Request, run_id: PathId) -> Response:
    """Show a run with its history and what it waits for."""
    return await _run(operator, admin, request, run_id, None)


@router.get("/runs/{run_id}/now", dependencies=[UNATTENDED])
async def run_fragment(operator: PageOperator, admin: Admin, request: Request, run_id: PathId) -> Response:
    """Return what changes of a run's page."""
    run = await show_run(operator, admin, run_id, _EVENTS)
    return operator_page(request, operator, "operators/run_now.html", run=run)


@router.post("/runs/{run_id}/move")
async def move(operator: PageOperator, admin: Admin, request: Request, run_id: PathId, form: FormFields) -> Response:
    """Have another trainer take the run."""
    try:
        body = body_of(MoveRequest, to=trimmed(form, "to"), reason=given_reason(form))
        found = await move_run(operator, admin, request, run_id, body, _once(operator, admin, request))
        if found.outcome is Outcome.IS_THERE:
            raise InvalidRequest(
                f"trainer {found.trainer} has the run already: name another one, or none for any other"
            )
    except WeftError as refusal:
        return await _run(operator, admin, request, run_id, refusal)
    return see(f"{OPS}/runs/{run_id}")


@router.post("/runs/{run_id}/evict")
async def evict(operator: PageOperator, admin: Admin, request: Request, run_id: PathId, form: FormFields) -> Response:
    """Have the run's adapter written to disk and its memory freed."""
    try:
        body = body_of(ReasonBody, reason=given_reason(form))
        found = await evict_run(operator, admin, request, run_id, body, _once(operator, admin, request))
        if found.outcome is Outcome.NOT_RESIDENT:
            raise InvalidRequest("no trainer has the run, so that no memory holds it: there is nothing to page out")
    except WeftError as refusal:
        return await _run(operator, admin, request, run_id, refusal)
    return see(f"{OPS}/runs/{run_id}")


@router.get("/sessions")
async def sessions_page(
    operator: PageOperator, admin: Admin, request: Request, tenant_id: QueryText = None, after: QueryText = None
) -> Response:
    """List clients' sessions: of all tenants or of one."""
    return await _sessions(operator, admin, request, None, tenant_id=tenant_id, after=after)


@router.post("/sessions/{session_id}/end")
async def end(operator: PageOperator, admin: Admin, request: Request, session_id: PathId, form: FormFields) -> Response:
    """End a client's session and cancel what it has pending. The list stays where it is."""
    listed = {name: value for name in ("tenant_id", "after") if (value := trimmed(form, name)) is not None}
    try:
        body = body_of(ReasonBody, reason=given_reason(form))
        await end_session(operator, admin, request, session_id, body, _once(operator, admin, request))
    except WeftError as refusal:
        return await _sessions(operator, admin, request, refusal, **listed)
    return see(f"{OPS}/sessions?{urlencode(listed)}")


def _once(operator: Operator, admin: AdminServices, request: Request) -> Repeats:
    """Return the form's change as one that no browser repeats by itself."""
    return Repeats(admin, request, operator.name, None)


async def _run(
    operator: Operator, admin: AdminServices, request: Request, run_id: str, refusal: WeftError | None
) -> Response:
    run = await show_run(operator, admin, run_id, _EVENTS)
    return operator_page(request, operator, "operators/run.html", refusal=refusal, run=run)


async def _sessions(
    operator: Operator,
    admin: AdminServices,
    request: Request,
    refusal: WeftError | None,
    *,
    tenant_id: str | None = None,
    after: str | None = None,
) -> Response:
    wanted = await tenant_id_of(admin, tenant_id)
    found = await list_sessions(operator, admin, tenant_id=wanted, after=after, limit=_A_PAGE)
    return operator_page(
        request,
        operator,
        "operators/sessions.html",
        refusal=refusal,
        sessions=found.items,
        next=found.next,
        after=after,
        asked={"tenant_id": tenant_id or ""},
        names=await names_of(admin, (one.tenant_id for one in found.items)),
    )
