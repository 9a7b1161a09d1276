"""Endpoints of a tenant's runs as weft tells them: a filtered list by pages, one run, and the marks of its curve."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.acting import record_act
from api.authentication import Reader, TrainCaller
from api.json_body import PathId, json_body
from api.services import ApiServices, Services
from api.wire.request_model import NO_NUL, RequestModel
from contracts.errors import InvalidRequest
from ledger.wakeups import shares_topic
from store.tables import Run
from tenants.audit_actions import Action
from tenants.projects import find_projects
from tenants.rights import Principal
from tenants.run_lists import (
    MOST_RECENT,
    MOST_RUNS,
    ListedRun,
    ListedState,
    RunFilter,
    listed_run,
    listed_runs,
    page_of_runs,
)
from tenants.run_lists import recent_losses as read_losses
from tenants.run_marks import MarkKind, RunMark, read_marks, steps_at
from tenants.runs import get_run, weigh_run

router = APIRouter(prefix="/runs", tags=["runs"])

DEFAULT_RUNS = 50

Text = Annotated[str, Query(max_length=300, pattern=NO_NUL)]


class RunInfo(BaseModel):
    """A training run.

    - ``state``: ``creating``, ``ready``, ``unloaded`` or ``failed``; ``ended`` once the session of an open run has ended.
    - ``weight``: weight of its passes among the runs of the tenant.
    - ``metrics``: names of the user's own metrics.
    - ``recent_losses``: mean losses of its last steps, as many as were asked for; null where there is no finite one.
    """

    id: str
    state: ListedState
    base_model: str
    project_id: str
    session_id: str
    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: str
    user_metadata: dict[str, str] | None
    sdk_version: str
    created_at: datetime
    last_request_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    optimizer_steps: int
    weight: float
    metrics: list[str]
    recent_losses: list[float | None]


class RunList(BaseModel):
    """Runs, latest first. ``next_cursor`` is that of the next page, null on the last one."""

    runs: list[RunInfo]
    next_cursor: str | None


class NewWeight(RequestModel):
    """Weight of a run among the runs of its tenant, 0.01 to 100; 1 is the weight that every run begins with."""

    weight: float


class RunWeight(BaseModel):
    """Weight of a run's passes among the runs of its tenant."""

    id: str
    weight: float


class MarkInfo(BaseModel):
    """Something that happened to the run. ``step``: its last optimizer step that had ended by then, 0 before the first."""

    id: str
    kind: MarkKind
    at: datetime
    step: int
    text: str
    name: str | None


class MarkList(BaseModel):
    """Marks in order of time, the newest 300."""

    marks: list[MarkInfo]


@router.get("")
async def list_runs(
    caller: Reader,
    services: Services,
    project_id: Text | None = None,
    base_model: Text | None = None,
    state: ListedState | None = None,
    text: Text | None = None,
    metadata: Text | None = None,
    recent: Annotated[int, Query(ge=0, le=MOST_RECENT)] = 0,
    limit: Annotated[int, Query(ge=1, le=MOST_RUNS)] = DEFAULT_RUNS,
    cursor: Text | None = None,
) -> RunList:
    """List the caller's runs, latest first, with the losses of their last ``recent`` steps.

    ``text``: part of the id, the base model or the metadata. ``metadata``: one entry whole, as ``name=value``.
    Raises ``Forbidden`` for an unknown project, ``InvalidRequest`` for a wrong cursor.
    """
    async with services.runtime.database.survey() as session:
        projects = None if not project_id else await find_projects(session, caller.reach, [project_id])
        which = RunFilter(
            owner=caller.reach,
            projects=projects,
            base_model=base_model or None,
            state=state,
            text=text or None,
            metadata=_entry(metadata),
        )
        page = await page_of_runs(session, which, most=limit, cursor=cursor)
        losses = await read_losses(session, [one.run for one in page.runs], most=recent)
    return RunList(runs=[_info(one, losses.get(one.run.id, [])) for one in page.runs], next_cursor=page.next)


@router.get("/{run_id}")
async def describe_run(
    caller: Reader,
    services: Services,
    run_id: PathId,
    recent: Annotated[int, Query(ge=0, le=MOST_RECENT)] = 0,
) -> RunInfo:
    """Describe one run. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        found = await listed_run(session, caller.reach, run_id)
        losses = await read_losses(session, [found.run], most=recent)
    return _info(found, losses.get(found.run.id, []))


async def describe_runs(
    caller: Principal, services: ApiServices, run_ids: Sequence[str], *, recent: int
) -> list[RunInfo]:
    """Return what is told of each of the runs that the caller may read, in one statement and one for their losses."""
    async with services.runtime.database.read() as session:
        found = await listed_runs(session, caller.reach, run_ids)
        losses = await read_losses(session, [one.run for one in found], most=recent)
    return [_info(one, losses.get(one.run.id, [])) for one in found]


@router.put("/{run_id}/weight")
async def weigh_own_run(
    caller: TrainCaller, services: Services, run_id: PathId, body: Annotated[NewWeight, json_body(NewWeight)]
) -> RunWeight:
    """Give the run a weight among the tenant's runs: of two with work, one of weight 3 is served three times as much.

    It holds from the next pass on, and changes nothing for other tenants. Raises ``NotFound``, ``InvalidRequest``.
    """
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        run = await get_run(transaction, caller.reach, run_id)
        before = await weigh_run(transaction, run, body.weight)
        if before != body.weight:
            await record_act(
                transaction,
                services,
                caller,
                Action.RUN_WEIGH,
                run_id,
                session_id=run.session_id,
                before={"weight": before},
                after={"weight": body.weight},
            )
            runtime.wakeups.announce_after_commit(transaction, shares_topic())
    return RunWeight(id=run_id, weight=body.weight)


@router.get("/{run_id}/marks")
async def marks_of_run(caller: Reader, services: Services, run_id: PathId) -> MarkList:
    """Tell what happened to the run beside its steps: saves, versions, its trainers, pauses. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        marks = await read_marks(session, run, services.runtime.clock())
        return MarkList(marks=await placed_marks(session, run, marks))


async def placed_marks(session: AsyncSession, run: Run, marks: list[RunMark]) -> list[MarkInfo]:
    """Return the marks with their steps."""
    steps = await steps_at(session, run, [mark.at for mark in marks])
    return [
        MarkInfo(id=mark.id, kind=mark.kind, at=mark.at, step=step, text=mark.text, name=mark.name)
        for mark, step in zip(marks, steps, strict=True)
    ]


def _entry(metadata: str | None) -> tuple[str, str] | None:
    """Return the name and the value of an entry. Raises ``InvalidRequest``."""
    if not metadata:
        return None
    name, equals, value = metadata.partition("=")
    if not equals or not name:
        raise InvalidRequest("metadata: send one entry as name=value; its name has no =")
    return name, value


def _info(listed: ListedRun, losses: list[float | None]) -> RunInfo:
    run = listed.run
    return RunInfo(
        id=run.id,
        state=listed.state,
        base_model=run.base_model,
        project_id=listed.project,
        session_id=run.session_id,
        rank=run.rank,
        alpha=run.alpha,
        seed=run.seed,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        optimizer=run.optimizer,
        user_metadata=run.user_metadata,
        sdk_version=listed.sdk_version,
        created_at=run.created_at,
        last_request_at=run.last_request_at,
        ended_at=listed.ended_at,
        end_reason=listed.end_reason,
        optimizer_steps=run.optimizer_steps,
        weight=run.weight,
        metrics=run.metric_names or [],
        recent_losses=losses,
    )
