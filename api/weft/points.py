"""Endpoints of a run's curve: points of its optimizer steps, and metrics that its user adds."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.authentication import Reader, TrainCaller
from api.json_body import PathId, json_body
from api.route_bounds import METADATA_BODY, bounded
from api.services import Services
from api.wire.request_model import NO_NUL, BodyPart, ListOf, MapOf, RequestModel
from contracts.errors import InvalidRequest, NotFound
from tenants.limits import limits_of
from tenants.reach import check_lane
from tenants.run_metrics import MOST_VALUES, metric_values, record_metrics
from tenants.run_points import MOST_POINTS, points_after
from tenants.runs import get_run

router = APIRouter(prefix="/runs/{run_id}", tags=["runs"])

DEFAULT_POINTS = 500
_LARGEST_STEP = 2**53

Step = Annotated[int, Field(ge=0, le=_LARGEST_STEP)]


class PointInfo(BaseModel):
    """An optimizer step of the run, the first being 1, and the passes since the step before.

    - ``mean_loss``: ``loss_sum / loss_weight``; null where that is not defined or not finite.
    - ``loss_per``: what the loss is divided by: ``weight``, ``sampled_token``, ``token``, ``mixed`` or ``nothing``.
    - ``loss_fns``: the passes' loss functions, each once, in their order; none of a point that an earlier version made.
    - ``sampling_kl``: nats a sampled token, of the weights from those that sampled it; null without sampled tokens.
    - ``adapter_step``: steps that the adapter counts; goes back where the run loads an older state.
    """

    step: int
    at: datetime
    mean_loss: float | None
    loss_sum: float | None
    loss_weight: float
    loss_per: str
    loss_fns: list[str]
    tokens: int
    learning_rate: float | None
    grad_norm: float | None
    sampling_kl: float | None
    sampled_tokens: int
    adapter_step: int | None


class Points(BaseModel):
    """Points in order of their steps. ``optimizer_steps``: steps of the whole run. ``metrics``: names of own metrics."""

    points: list[PointInfo]
    optimizer_steps: int
    metrics: list[str]


class ValueInfo(BaseModel):
    """Value of a metric at a step; null for one that was not finite."""

    step: int
    value: float | None
    at: datetime


class MetricValues(BaseModel):
    """Values of one metric in order of their steps."""

    name: str
    values: list[ValueInfo]


class PointMetrics(BodyPart):
    """Own metrics at a step of the user's own count; null for a number that is not finite."""

    step: Step
    metrics: MapOf[float | None]


class MetricsBody(RequestModel):
    """Body of ``POST .../points``."""

    points: ListOf[PointMetrics]


class Recorded(BaseModel):
    """Number of values that the request brought."""

    values: int


@router.get("/points")
async def read_points(
    caller: Reader,
    services: Services,
    run_id: PathId,
    after: Annotated[int, Query(ge=0, le=_LARGEST_STEP)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_POINTS)] = DEFAULT_POINTS,
) -> Points:
    """Return the run's points after step ``after``. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        found = await points_after(session, run.id, after, most=limit)
    return Points(
        points=[PointInfo.model_validate(point, from_attributes=True) for point in found],
        optimizer_steps=run.optimizer_steps,
        metrics=run.metric_names or [],
    )


@router.post("/points")
@bounded(body=METADATA_BODY)
async def add_metrics(
    caller: TrainCaller, services: Services, run_id: PathId, body: Annotated[MetricsBody, json_body(MetricsBody)]
) -> Recorded:
    """Record own metrics of the run, idempotent by step and name: a later value replaces an earlier one.

    Raises ``NotFound``, ``InvalidRequest``.
    """
    values: dict[tuple[str, int], float | None] = {}
    for point in body.points:
        for name, value in point.metrics.items():
            if not 1 <= len(name) <= 100 or "\0" in name:
                raise InvalidRequest(f"a metric's name must have 1 to 100 characters and no NUL; got {name[:100]!r}")
            values[name, point.step] = value
    if not 1 <= len(values) <= MOST_VALUES:
        raise InvalidRequest(f"a request must have 1 to {MOST_VALUES} values of metrics; got {len(values)}")
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        await check_lane(transaction, caller.reach, run_id, NotFound(f"no model {run_id[:150]!r}"))
        limits = await limits_of(transaction, caller.tenant, services.limits)
        await record_metrics(transaction, caller.tenant, run_id, values, limits=limits, now=runtime.clock())
    return Recorded(values=len(values))


@router.get("/metrics")
async def read_metric(
    caller: Reader,
    services: Services,
    run_id: PathId,
    name: Annotated[str, Query(min_length=1, max_length=100, pattern=NO_NUL)],
    after: Annotated[int, Query(ge=-1, le=_LARGEST_STEP)] = -1,
    limit: Annotated[int, Query(ge=1, le=MOST_VALUES)] = DEFAULT_POINTS,
) -> MetricValues:
    """Return the values of the run's own metric ``name`` at steps after ``after``. Raises ``NotFound`` for the run."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        found = await metric_values(session, run.id, name, after=after, most=limit)
    return MetricValues(name=name, values=[ValueInfo(step=one.step, value=one.value, at=one.at) for one in found])
