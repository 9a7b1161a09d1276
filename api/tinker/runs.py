"""Endpoints of a tenant's training runs: list and describe."""

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import Reader
from api.checkpoint_records import CheckpointInfo, checkpoint_info
from api.json_body import PathId
from api.long_lists import encoded_list, long_answer
from api.paging import Cursor, Page, cursor_of
from api.services import ApiServices, Services
from api.wire.request_model import NO_NUL
from contracts.ids import TenantId
from contracts.paths import Segment
from store.tables import Checkpoint, Run, RunState
from tenants.checkpoint_lists import latest_checkpoints
from tenants.projects import find_projects
from tenants.reach import Reach
from tenants.runs import get_run, run_pages, total_runs
from tenants.tenant_names import tenant_name

router = APIRouter(tags=["runs"])

Latest: TypeAlias = Mapping[tuple[str, str], Checkpoint]
"""Newest checkpoints, by run and segment."""


class TrainingRun(BaseModel):
    """A training run. ``model_owner``: the tenant's name. ``corrupted``: its creation failed, so that there is no adapter."""

    model_config = ConfigDict(protected_namespaces=())

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    lora_rank: int
    corrupted: bool
    last_request_time: datetime
    last_checkpoint: CheckpointInfo | None
    last_sampler_checkpoint: CheckpointInfo | None
    user_metadata: dict[str, str] | None


class TrainingRunList(BaseModel):
    """A page of runs, newest first."""

    training_runs: list[TrainingRun]
    cursor: Cursor


@router.get("/training_runs", response_model=TrainingRunList)
async def list_training_runs(
    caller: Reader, services: Services, page: Page, project_id: Annotated[str | None, Query(pattern=NO_NUL)] = None
) -> Response:
    """List the caller's runs, newest first; of one project if it is given. Raises ``Forbidden`` for an unknown project."""
    async with services.runtime.database.survey() as session:
        reach = caller.reach
        if project_id is not None:
            reach = Reach(caller.tenant, await find_projects(session, caller.reach, [project_id]))
        total = await total_runs(session, reach)
        owner = await tenant_name(session, caller.tenant)
        pages = _shown_pages(
            session, services, caller.tenant, run_pages(session, reach, limit=page.limit, offset=page.offset)
        )
        listed = await encoded_list(pages, lambda told: _training_run(told[0], owner, told[1]).model_dump(mode="json"))
    return long_answer(training_runs=listed, cursor=cursor_of(page, total).model_dump())


@router.get("/training_runs/{run_id}")
async def get_training_run(caller: Reader, services: Services, run_id: PathId) -> TrainingRun:
    """Describe one run. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        latest = await latest_checkpoints(session, caller.tenant, [run.id], services.runtime.clock)
        owner = await tenant_name(session, caller.tenant)
    return _training_run(run, owner, latest)


async def _shown_pages(
    session: AsyncSession, services: ApiServices, tenant: TenantId, pages: AsyncIterator[Sequence[Run]]
) -> AsyncIterator[list[tuple[Run, Latest]]]:
    """Iterate over the runs of the pages, each with the newest checkpoints of its page."""
    async for runs in pages:
        latest = await latest_checkpoints(session, tenant, [run.id for run in runs], services.runtime.clock)
        yield [(run, latest) for run in runs]


def _training_run(run: Run, owner: str, latest: Latest) -> TrainingRun:
    def last(segment: Segment) -> CheckpointInfo | None:
        row = latest.get((run.id, segment))
        return None if row is None else checkpoint_info(row)

    return TrainingRun(
        training_run_id=run.id,
        base_model=run.base_model,
        model_owner=owner,
        lora_rank=run.rank,
        corrupted=run.state == RunState.FAILED,
        last_request_time=run.last_request_at,
        last_checkpoint=last(Segment.WEIGHTS),
        last_sampler_checkpoint=last(Segment.SAMPLER_WEIGHTS),
        user_metadata=run.user_metadata,
    )
