"""Pages of adapters and their gates: state, pause, resume, and the version that live samplers follow."""

from collections.abc import Awaitable
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from api.dashboard.form_values import body_of, integer, number, text
from api.dashboard.forms import Form, see
from api.dashboard.rendering import page
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import PageGateKeeper, PageGateReader
from api.errors import error_response
from api.json_body import PathId
from api.openai.models import version_of_run
from api.paging import CursorPage, PageRequest
from api.route_bounds import bounded
from api.security_events import note_refusal
from api.services import ApiServices, Services
from api.weft import adapters
from api.weft.adapters import GateState, PauseRequest, ReloadRequest, ResumeRequest
from api.weft.checkpoints import KeptFilter, kept_checkpoints
from contracts.errors import InvalidRequest, NotFound
from contracts.ids import CheckpointId, RunId
from tenants.rights import Principal, Scope
from tenants.version_facts import VersionFacts, version_facts

router = APIRouter(prefix="/adapters")

_MOST_VERSIONS = 100


@router.get("")
async def adapters_page(caller: PageGateReader, services: Services, request: Request, page_of: CursorPage) -> Response:
    """Show a page of adapters with their gates."""
    found = await adapters.list_adapters(caller, services, page_of)
    return page(request, "tenant/adapters.html", found=found, at=_place(page_of))


@router.get("/table", dependencies=[UNATTENDED])
async def adapters_table(caller: PageGateReader, services: Services, request: Request, page_of: CursorPage) -> Response:
    """Show the table of that page alone, as it is now."""
    found = await adapters.list_adapters(caller, services, page_of)
    return page(request, "tenant/adapters_table.html", found=found, at=_place(page_of))


def _place(page_of: PageRequest) -> str:
    return "" if page_of.after is None else page_of.after.cursor


@router.get("/{run_id}")
async def adapter_page(caller: PageGateReader, services: Services, request: Request, run_id: PathId) -> Response:
    """Show one adapter's gate, its versions, and the forms that change it."""
    return await _adapter(caller, services, request, run_id)


@router.get("/{run_id}/panel", dependencies=[UNATTENDED])
async def adapter_panel(caller: PageGateReader, services: Services, request: Request, run_id: PathId) -> Response:
    """Show the gate's state alone, as it is now."""
    state = await adapters.describe(caller, services, run_id)
    follows, facts = await _versions(services, caller, state)
    return page(request, "tenant/adapter_panel.html", state=state, follows=follows, facts=facts)


@router.get("/{run_id}/state", dependencies=[UNATTENDED])
async def adapter_state(caller: PageGateReader, services: Services, run_id: PathId) -> GateState:
    """Return the gate's state for scripts."""
    return await adapters.describe(caller, services, run_id)


@router.post("/{run_id}/pause")
async def pause(caller: PageGateKeeper, services: Services, request: Request, run_id: PathId, form: Form) -> Response:
    """Pause the adapter if its gate is still as the form has shown it. The page tells when nothing is in flight any more."""
    minutes = number(form, "ttl_minutes")
    body = body_of(
        PauseRequest,
        mode=text(form, "mode"),
        reason=text(form, "reason"),
        ttl_seconds=None if minutes is None else 60 * minutes,
        generation=integer(form, "generation"),
        timeout_seconds=0,
        clear_cache=text(form, "clear_cache") is not None,
    )
    return await _turned(caller, services, request, run_id, adapters.pause(caller, services, run_id, body))


@router.post("/{run_id}/resume")
@bounded(goes_on=True)
async def resume(caller: PageGateKeeper, services: Services, request: Request, run_id: PathId, form: Form) -> Response:
    """End the pause that the form has shown."""
    body = body_of(ResumeRequest, generation=integer(form, "generation"))
    return await _turned(caller, services, request, run_id, adapters.resume(caller, services, run_id, body))


@router.post("/{run_id}/reload")
async def reload(caller: PageGateKeeper, services: Services, run_id: PathId, form: Form) -> Response:
    """Have live samplers follow the version that was chosen, by default the newest."""
    await adapters.reload(caller, services, run_id, body_of(ReloadRequest, path=text(form, "path")))
    return see(_address(run_id))


async def _turned(
    caller: Principal, services: ApiServices, request: Request, run_id: str, turning: Awaitable[GateState]
) -> Response:
    """Answer with the page, or to a script with the gate's new state. A refusal is told on the page as it is now."""
    is_script = request.headers.get("accept") == "application/json"
    try:
        state = await turning
    except InvalidRequest as refusal:
        note_refusal(request, refusal)
        if is_script:
            return error_response(refusal.status, detail=refusal.message, code=refusal.code, retryable=False)
        return await _adapter(caller, services, request, run_id, refusal)
    return JSONResponse(state.model_dump(mode="json")) if is_script else see(_address(run_id))


async def _adapter(
    caller: Principal, services: ApiServices, request: Request, run_id: str, refusal: InvalidRequest | None = None
) -> Response:
    state = await adapters.describe(caller, services, run_id)
    kept = None
    if Scope.READ in caller.scopes:
        asked = KeptFilter(run=run_id, type="sampler")
        kept = await kept_checkpoints(caller, services, PageRequest(_MOST_VERSIONS, 0), asked)
    follows, facts = await _versions(services, caller, state)
    told = ("", 200) if refusal is None else (refusal.message, refusal.status)
    shown = {"state": state, "follows": follows, "facts": facts, "kept": kept, "problem": told[0]}
    return page(request, "tenant/adapter.html", status=told[1], **shown)


def _address(run_id: str) -> str:
    return f"/ui/adapters/{quote(run_id, safe=':')}"


async def _versions(
    services: ApiServices, caller: Principal, state: GateState
) -> tuple[CheckpointId | None, dict[str, VersionFacts]]:
    """Return the version of live samples, None before the first, and what is known of it and of those in flight."""
    versions = {version for found in state.versions.values() for version in found}
    async with services.runtime.database.read() as session:
        try:
            follows = await version_of_run(services, session, caller, RunId(state.adapter))
        except NotFound:
            follows = None
        known = versions if follows is None else versions | {follows}
        return follows, await version_facts(session, caller.reach, known)
