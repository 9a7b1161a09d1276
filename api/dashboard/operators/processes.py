"""Page of processes: trainers, sampling processes, API processes, and those that have died; a form drains a trainer."""

from typing import Any

from fastapi import APIRouter, Request, Response

from api.admin.bodies import PathId, ReasonBody
from api.admin.processes import drain, list_all_apis, list_all_pools, list_all_trainers, list_ended_processes, undrain
from api.admin.queue import list_placements
from api.admin.services import Admin, AdminServices
from api.dashboard.form_values import body_of
from api.dashboard.forms import see
from api.dashboard.operators.forms import FormFields, given_reason
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED
from contracts.errors import WeftError
from tenants.operator_keys import Operator

router = APIRouter()


@router.get("/processes")
async def processes_page(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """List trainers, sampling processes, API processes, those that have died, and runs that wait for a trainer."""
    return await _page(operator, admin, request, None)


@router.get("/processes/now", dependencies=[UNATTENDED])
async def processes_fragment(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Return the tables of processes, which change."""
    return operator_page(request, operator, "operators/processes_now.html", **await _found(operator, admin))


@router.post("/processes/{trainer_id}/drain")
async def drain_trainer(
    operator: PageOperator, admin: Admin, request: Request, trainer_id: PathId, form: FormFields
) -> Response:
    """Have a trainer hand its runs to others and take none."""
    try:
        await drain(operator, admin, request, trainer_id, body_of(ReasonBody, reason=given_reason(form)))
    except WeftError as refusal:
        return await _page(operator, admin, request, refusal)
    return see("/ops/processes")


@router.post("/processes/{trainer_id}/work")
async def work_trainer(operator: PageOperator, admin: Admin, request: Request, trainer_id: PathId) -> Response:
    """Have a drained trainer take runs again."""
    try:
        await undrain(operator, admin, request, trainer_id)
    except WeftError as refusal:
        return await _page(operator, admin, request, refusal)
    return see("/ops/processes")


async def _found(operator: Operator, admin: AdminServices) -> dict[str, Any]:
    trainers = (await list_all_trainers(operator, admin)).items
    return {
        "trainers": trainers,
        # Base models for which a trainer takes runs.
        "taken": {one.base_model for one in trainers if one.is_alive and one.drained_at is None},
        "pools": (await list_all_pools(operator, admin)).items,
        "apis": (await list_all_apis(operator, admin)).items,
        "ended": (await list_ended_processes(operator, admin)).items,
        "placements": (await list_placements(operator, admin)).items,
    }


async def _page(operator: Operator, admin: AdminServices, request: Request, refusal: WeftError | None) -> Response:
    found = await _found(operator, admin)
    return operator_page(request, operator, "operators/processes.html", refusal=refusal, **found)
