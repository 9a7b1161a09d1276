"""Page of housekeeping: when each step last succeeded, and a form to run one now."""

from fastapi import APIRouter, Request, Response

from api.admin.housekeeping import HousekeepingRun, run_housekeeping, show_housekeeping
from api.admin.services import Admin
from api.dashboard.form_values import body_of
from api.dashboard.operators.forms import FormFields
from api.dashboard.operators.rendering import operator_page
from api.dashboard.operators.session import PageOperator
from contracts.errors import WeftError

router = APIRouter()


@router.get("/housekeeping")
async def housekeeping_page(operator: PageOperator, admin: Admin, request: Request) -> Response:
    """List the steps."""
    steps = (await show_housekeeping(operator, admin)).items
    return operator_page(request, operator, "operators/housekeeping.html", steps=steps, ran=[])


@router.post("/housekeeping/run")
async def run_step(operator: PageOperator, admin: Admin, request: Request, form: FormFields) -> Response:
    """Run a step until nothing is left, and show what came of it."""
    refusal: WeftError | None = None
    ran = []
    try:
        ran = (await run_housekeeping(operator, admin, body_of(HousekeepingRun, step=form.get("step", "")))).items
    except WeftError as error:
        refusal = error
    steps = (await show_housekeeping(operator, admin)).items
    return operator_page(request, operator, "operators/housekeeping.html", refusal=refusal, steps=steps, ran=ran)
