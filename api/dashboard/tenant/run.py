"""One run: its live curve with marks, why it waits, its settings, and the curve's data as JSON, CSV and a stream."""

import csv
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.dashboard.events import event_stream, last_event_id
from api.dashboard.feeds import Curves, Feeds
from api.dashboard.page_downloads import PageDownload
from api.dashboard.rendering import large_page
from api.dashboard.run_feeds import standing_told
from api.dashboard.tenant.runs import project_name, settings_of
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import COUNTED, PageReader
from api.json_body import PathId
from api.route_bounds import Holding, bounded
from api.services import ApiServices, Services
from api.weft.client_exceptions import list_client_exceptions
from api.weft.points import PointInfo, read_metric, read_points
from api.weft.projects import list_own_projects
from api.weft.runs import describe_run, marks_of_run
from api.weft.waiting import why_a_run_waits
from api.wire.request_model import NO_NUL
from contracts.csv_cells import cell
from contracts.errors import InvalidRequest
from tenants.curves import Series
from tenants.rights import Principal
from tenants.run_metrics import MOST_VALUES, last_values
from tenants.run_points import MOST_POINTS, LossPer

router = APIRouter(prefix="/runs/{run_id}")

SHOWN_POINTS = 50
MOST_SHOWN_VALUES = 2000
"""Values of own metrics that a page shows in tables: of each at most as many as points, and fewer of many metrics."""
_OWN = "metric:"
_LARGEST_STEP = 2**53
_COLUMNS = (
    "step",
    "at",
    "mean_loss",
    "loss_sum",
    "loss_weight",
    "loss_per",
    "loss_fns",
    "tokens",
    "learning_rate",
    "grad_norm",
    "sampling_kl",
    "sampled_tokens",
    "adapter_step",
)

Step = Annotated[int, Query(ge=0, le=_LARGEST_STEP)]


@router.get("")
async def run_page(request: Request, caller: PageReader, services: Services, run_id: PathId) -> Response:
    """Show a run."""
    run = await describe_run(caller, services, run_id)
    projects = (await list_own_projects(caller, services)).projects
    newest = await read_points(caller, services, run.id, after=max(0, run.optimizer_steps - SHOWN_POINTS))
    points = newest.points[::-1]
    async with services.runtime.database.read() as session:
        shown = min(SHOWN_POINTS, MOST_SHOWN_VALUES // max(1, len(run.metrics)))
        own = await last_values(session, run.id, run.metrics, most=shown)
    died = (await list_client_exceptions(caller, services, run_id=run.id, limit=1)).exceptions
    return await large_page(
        request,
        caller,
        "tenant/run.html",
        run=run,
        project=project_name(run, projects),
        settings=settings_of(run, projects),
        waiting=await why_a_run_waits(caller, services, run.id),
        marks=(await marks_of_run(caller, services, run.id)).marks[::-1],
        points=points,
        died=died[0] if died else None,
        per=_per(points[0]) if points else "",
        series=[one for one in Series if one is not Series.MEAN_LOSS],
        own=own,
        shown=shown,
        speed=_tokens_per_second(newest.points),
    )


@router.get("/curve")
@router.get("/curve/now", dependencies=[UNATTENDED])
async def curve(
    caller: PageReader,
    services: Services,
    curves: Curves,
    run_id: PathId,
    series: Annotated[str, Query(max_length=120, pattern=NO_NUL)] = Series.MEAN_LOSS,
    begin: Step | None = None,
    end: Step | None = None,
) -> Response:
    """Return the run's curve of a series or of an own metric, or its part between two steps, in at most 2,000 entries.

    Raises ``NotFound``, ``InvalidRequest``.
    """
    run = await describe_run(caller, services, run_id)
    if series.startswith(_OWN):
        columns = await curves.metric(run.id, series.removeprefix(_OWN), begin or 0, end)
    elif series not in set(Series):
        raise InvalidRequest(f"series: there is no {series[:50]!r}; choose one of {', '.join(Series)}, or {_OWN}NAME")
    elif begin is None and end is None:
        columns = await curves.series(run.id, Series(series))
    else:
        last = run.optimizer_steps
        columns = await curves.range_of(run.id, Series(series), begin or 0, last if end is None else min(end, last))
    return Response(orjson.dumps(asdict(columns)), media_type="application/json")


@router.get("/events", dependencies=[UNATTENDED])
@bounded(holding=Holding.STREAM)
async def run_events(
    request: Request,
    caller: PageReader,
    services: Services,
    feeds: Feeds,
    run_id: PathId,
    after: Step = 0,
) -> StreamingResponse:
    """Stream the run's new points, marks and standing; an event's id is the step of its last point. Raises ``NotFound``."""
    run = await describe_run(caller, services, run_id)
    seen = last_event_id(request)
    if seen and seen.isascii() and seen.isdigit() and len(seen) < 16:
        after = int(seen)
    return event_stream(request, services, partial(feeds.watch, caller.tenant, run.id, after), run=run.id)


@router.get("/news", dependencies=[UNATTENDED])
async def run_news(caller: PageReader, services: Services, run_id: PathId, after: Step = 0) -> Response:
    """Return what the stream tells after step ``after``, for a page that has none. Raises ``NotFound``."""
    run = await describe_run(caller, services, run_id)
    found = await read_points(caller, services, run.id, after=after, limit=MOST_POINTS)
    marks = await marks_of_run(caller, services, run.id)
    waiting = await why_a_run_waits(caller, services, run.id)
    news = {
        "points": [point.model_dump() for point in found.points],
        "marks": [mark.model_dump() for mark in marks.marks],
        "standing": standing_told(run.state, run.end_reason, waiting, run.metrics),
    }
    return Response(orjson.dumps(news), media_type="application/json")


@router.get("/points.csv", dependencies=[COUNTED])
@bounded(holding=Holding.STREAM)
async def points_csv(request: Request, caller: PageReader, services: Services, run_id: PathId) -> PageDownload:
    """Return every point of the run as CSV, read page by page. Raises ``NotFound``."""
    run = await describe_run(caller, services, run_id)
    headers = {"Content-Disposition": 'attachment; filename="points.csv"'}
    lines = StreamingResponse(_lines(caller, services, run.id), media_type="text/csv; charset=utf-8", headers=headers)
    return PageDownload(request, lines)


@router.get("/metrics.csv", dependencies=[COUNTED])
@bounded(holding=Holding.STREAM)
async def metrics_csv(request: Request, caller: PageReader, services: Services, run_id: PathId) -> PageDownload:
    """Return every value of the run's own metrics as CSV, read page by page. Raises ``NotFound``."""
    run = await describe_run(caller, services, run_id)
    headers = {"Content-Disposition": 'attachment; filename="metrics.csv"'}
    lines = StreamingResponse(
        _metric_lines(caller, services, run.id, run.metrics), media_type="text/csv; charset=utf-8", headers=headers
    )
    return PageDownload(request, lines)


def _tokens_per_second(points: Sequence[PointInfo]) -> float | None:
    """Return the speed of training over the points, None where two are not told apart."""
    if len(points) < 2:
        return None
    seconds = (points[-1].at - points[0].at).total_seconds()
    return sum(point.tokens for point in points[1:]) / seconds if seconds > 0 else None


async def _metric_lines(caller: Principal, services: ApiServices, run: str, names: Sequence[str]) -> AsyncIterator[str]:
    yield _csv([["name", "step", "at", "value"]])
    for name in names:
        after = -1
        while True:
            found = (await read_metric(caller, services, run, name, after=after, limit=MOST_VALUES)).values
            if found:
                yield _csv([[cell(name), cell(one.step), cell(one.at), cell(one.value)] for one in found])
                after = found[-1].step
            if len(found) < MOST_VALUES:
                break


async def _lines(caller: Principal, services: ApiServices, run: str) -> AsyncIterator[str]:
    yield _csv([list(_COLUMNS)])
    after = 0
    while True:
        found = (await read_points(caller, services, run, after=after, limit=MOST_POINTS)).points
        if found:
            yield _csv([_row(point) for point in found])
            after = found[-1].step
        if len(found) < MOST_POINTS:
            return


def _per(point: PointInfo) -> str:
    """Return what the point's loss is divided by, empty where its passes differ in that, or there were none."""
    return "" if point.loss_per in (LossPer.MIXED, LossPer.NOTHING) else point.loss_per.replace("_", " ")


def _row(point: PointInfo) -> list[str | float]:
    values = {name: getattr(point, name) for name in _COLUMNS} | {"loss_fns": ",".join(point.loss_fns)}
    return [cell(value) for value in values.values()]


def _csv(rows: list[list[str | float]]) -> str:
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()
