"""The list of runs: pages of thousands, filters in the address, live states, and a choice of runs to compare."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse

from api.dashboard.rendering import large_page, spark_label
from api.dashboard.sparkline import spark_path
from api.dashboard.unattended import UNATTENDED
from api.dashboard.web_session import PageReader
from api.project_records import ProjectBody
from api.services import ApiServices, Services
from api.weft.projects import list_own_projects
from api.weft.runs import RunInfo, RunList, describe_run, describe_runs, list_runs
from api.wire.request_model import NO_NUL
from contracts.errors import InvalidRequest
from tenants.curves import Series
from tenants.rights import Principal
from tenants.run_lists import ListedState

router = APIRouter(prefix="/runs")

SHOWN_RUNS = 50
SPARK_POINTS = 40
MOST_COMPARED = 4
MOST_ROWS = 500
"""Most settings of runs that are compared in one table: a run may have thousands of own metadata."""

Text = Annotated[str, Query(max_length=300, pattern=NO_NUL)]


class RunQuery:
    """Filters of the list, as the address has them."""

    def __init__(
        self,
        project: Text = "",
        base: Text = "",
        state: Text = "",
        text: Text = "",
        metadata: Text = "",
        cursor: Text = "",
    ) -> None:
        self.project, self.base, self.state = project, base, state
        self.text, self.metadata, self.cursor = text.strip(), metadata.strip(), cursor

    async def page(self, caller: Principal, services: ApiServices) -> RunList:
        """Return the runs of the page. Raises ``InvalidRequest``, ``Forbidden`` for an unknown project."""
        if self.state and self.state not in set(ListedState):
            raise InvalidRequest(f"state: there is no {self.state[:50]!r}; choose one of {', '.join(ListedState)}")
        return await list_runs(
            caller,
            services,
            project_id=self.project or None,
            base_model=self.base or None,
            state=ListedState(self.state) if self.state else None,
            text=self.text or None,
            metadata=self.metadata or None,
            recent=SPARK_POINTS,
            limit=SHOWN_RUNS,
            cursor=self.cursor or None,
        )

    @property
    def is_filtered(self) -> bool:
        """True if the list leaves out runs by a filter."""
        return any((self.project, self.base, self.state, self.text, self.metadata))

    def address(self, *, cursor: str | None = None) -> str:
        """Return the query of a page of the same list."""
        named = {
            "project": self.project,
            "base": self.base,
            "state": self.state,
            "text": self.text,
            "metadata": self.metadata,
            "cursor": cursor,
        }
        return urlencode({name: value for name, value in named.items() if value})


Filters = Annotated[RunQuery, Depends(RunQuery)]


@router.get("")
async def runs_page(request: Request, caller: PageReader, services: Services, filters: Filters) -> Response:
    """Show a page of runs."""
    found = await filters.page(caller, services)
    projects = (await list_own_projects(caller, services)).projects
    return await large_page(
        request,
        caller,
        "tenant/runs.html",
        rows=[_row(run, projects) for run in found.runs],
        filters=filters,
        older=None if found.next_cursor is None else filters.address(cursor=found.next_cursor),
        newest=filters.address() if filters.cursor else None,
        projects=projects,
        bases=sorted(services.bases),
        states=list(ListedState),
    )


@router.get("/live", dependencies=[UNATTENDED])
async def live_runs(
    caller: PageReader,
    services: Services,
    run: Annotated[list[Text] | None, Query(max_length=SHOWN_RUNS)] = None,
) -> JSONResponse:
    """Return what changes in the rows of these runs: no search is done again, and rows that newer runs push down go on."""
    found = await describe_runs(caller, services, run or (), recent=SPARK_POINTS)
    return JSONResponse({"runs": [_live(one) for one in found]})


@router.get("/compare")
async def compare_page(
    request: Request, caller: PageReader, services: Services, run: Annotated[list[Text] | None, Query()] = None
) -> Response:
    """Show the curves of two to four runs over each other, and where their settings differ."""
    chosen = list(dict.fromkeys(run or ()))
    if not 2 <= len(chosen) <= MOST_COMPARED:
        raise InvalidRequest(f"run: choose 2 to {MOST_COMPARED} runs to compare; got {len(chosen)}")
    runs = [await describe_run(caller, services, one, recent=1) for one in chosen]
    projects = (await list_own_projects(caller, services)).projects
    rows = _settings_of(runs, projects)
    # Those that differ first, in a table that is too long.
    shown = rows if len(rows) <= MOST_ROWS else sorted(rows, key=lambda row: not row["differs"])[:MOST_ROWS]
    return await large_page(
        request,
        caller,
        "tenant/compare.html",
        runs=runs,
        rows=shown,
        settings=len(rows),
        differing=sum(row["differs"] for row in rows),
        series=list(Series),
        own=sorted({name for one in runs for name in one.metrics}),
    )


def project_name(run: RunInfo, projects: list[ProjectBody]) -> str:
    """Return the name of the run's project, or its id if the caller may not read the name."""
    return next((one.name for one in projects if one.id == run.project_id), run.project_id)


def settings_of(run: RunInfo, projects: list[ProjectBody]) -> dict[str, Any]:
    """Return the settings of a run by their labels."""
    trained = {"attention": run.train_attn, "MLP": run.train_mlp, "unembedding": run.train_unembed}
    settings: dict[str, Any] = {
        "Base model": run.base_model,
        "Rank": run.rank,
        "Alpha": f"{run.alpha:g}",
        "Seed": run.seed,
        "Trained parts": ", ".join(name for name, is_trained in trained.items() if is_trained) or "none",
        "Optimizer": run.optimizer,
        "Project": project_name(run, projects),
        "SDK version": run.sdk_version or "not told",
    }
    return settings | {f"metadata {name}": value for name, value in sorted((run.user_metadata or {}).items())}


def _settings_of(runs: list[RunInfo], projects: list[ProjectBody]) -> list[dict[str, Any]]:
    of_each = [settings_of(run, projects) for run in runs]
    rows = []
    for name in dict.fromkeys(name for one in of_each for name in one):
        values = [one.get(name) for one in of_each]
        rows.append({"name": name, "values": values, "differs": len(set(map(str, values))) > 1})
    rows.append({"name": "Optimizer steps", "values": [run.optimizer_steps for run in runs], "differs": False})
    return rows


def _row(run: RunInfo, projects: list[ProjectBody]) -> dict[str, Any]:
    last = run.recent_losses[-1] if run.recent_losses else None
    return {
        "run": run,
        "loss": last,
        "project": project_name(run, projects),
    }


def _live(run: RunInfo) -> dict[str, Any]:
    last = run.recent_losses[-1] if run.recent_losses else None
    told = {"id": run.id, "state": run.state.value, "steps": run.optimizer_steps, "loss": last}
    drawn = {"path": spark_path(run.recent_losses), "label": spark_label(run.recent_losses)}
    return told | drawn | {"at": run.last_request_at.isoformat()}
