"""Page of replicas: their load and directives, and a form to drain one, put it to sleep or have it work again."""

from fastapi import APIRouter, Request, Response

from api.admin.processes import list_all_pools
from api.admin.replicas import NewDirective, direct, list_all_replicas, work
from api.admin.services import Admin, AdminServices
from api.dashboard.form_values import body_of
from api.dashboard.forms import see
from api.dashboard.operators.forms import FormFields, given_reason
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from api.dashboard.unattended import UNATTENDED
from contracts.errors import InvalidRequest, NotFound, WeftError
from tenants.operator_keys import Operator

router = APIRouter()

_WORK = "work"


@router.get("/replicas")
async def replicas_page(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """List replicas."""
    return await _page(operator, admin, request, None)


@router.get("/replicas/now", dependencies=[UNATTENDED])
async def replicas_fragment(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """Return the table of replicas, which changes."""
    replicas = (await list_all_replicas(operator, admin)).items
    return operator_page(request, operator, "operators/replicas_now.html", replicas=replicas)


@router.post("/replicas/directive")
async def direct_replica(operator: PageOperator, admin: Admin, request: Request, form: FormFields) -> Response:
    """Drain a replica, put it to sleep, or have it work again."""
    replica, base_model = form.get("replica", ""), form.get("base_model", "")
    try:
        if not 0 < len(replica) <= 200 or not 0 < len(base_model) <= 500:
            raise InvalidRequest("nothing was changed: name the base model and the replica, as the table has them")
        if form.get("directive", "") == _WORK:
            await _check_known(operator, admin, replica, base_model)
            await work(operator, admin, request, replica, base_model)
        else:
            body = body_of(
                NewDirective, base_model=base_model, directive=form.get("directive", ""), reason=given_reason(form)
            )
            await direct(operator, admin, request, replica, body)
    except WeftError as refusal:
        return await _page(operator, admin, request, refusal)
    return see("/ops/replicas")


async def _check_known(operator: Operator, admin: AdminServices, replica: str, base_model: str) -> None:
    """Raise ``NotFound`` for a replica that no process has told of and that has no directive."""
    if replica not in [one.replica for one in (await list_all_replicas(operator, admin, base_model)).items]:
        raise NotFound(f"no replica {replica!r} of {base_model[:150]}; the table has those that are known")


async def _page(operator: Operator, admin: AdminServices, request: Request, refusal: WeftError | None) -> Response:
    replicas = (await list_all_replicas(operator, admin)).items
    pools = (await list_all_pools(operator, admin)).items
    bases = sorted({one.base_model for one in replicas} | {one.base_model for one in pools})
    return operator_page(
        request,
        operator,
        "operators/replicas.html",
        refusal=refusal,
        replicas=replicas,
        bases=bases,
        known=sorted({one.replica for one in replicas}),
    )
