"""Housekeeping for operators: when each step last succeeded, and a run by hand."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.admin.bodies import Listed, operator_body
from api.admin.services import Admin, Caller, StepStanding
from api.wire.request_model import PlainText, RequestModel

router = APIRouter(tags=["housekeeping"])


class StepBody(BaseModel):
    """A step's last run. ``error``: failure of the run that was asked for."""

    step: str
    has_run: bool
    succeeded_at: datetime | None
    rows: int
    seconds: float
    behind_since: datetime | None
    failing_since: datetime | None
    error: str | None


class HousekeepingRun(RequestModel):
    """Step to run; null: every step, one after another."""

    step: Annotated[PlainText, Field(max_length=40)] | None = None


@router.get("/housekeeping")
async def show_housekeeping(caller: Caller, admin: Admin) -> Listed[StepBody]:
    """List the steps: when each last succeeded, how long it took, and for how long it has left work over or failed."""
    del caller
    return _body(await admin.housekeeper.status())


@router.post("/housekeeping/runs")
async def run_housekeeping(
    caller: Caller, admin: Admin, body: Annotated[HousekeepingRun, operator_body(HousekeepingRun)]
) -> Listed[StepBody]:
    """Run one step or all, each until nothing is left. Raises ``InvalidRequest`` for an unknown step."""
    del caller
    return _body(await admin.housekeeper.run(body.step))


def _body(steps: list[StepStanding]) -> Listed[StepBody]:
    return Listed(items=[StepBody.model_validate(one, from_attributes=True) for one in steps])
