"""Endpoints of a tenant's checkpoints: list, delete, set the time to live."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.authentication import CheckpointWriter, Reader
from api.json_body import PathId, json_body
from api.paging import Cursor, Page, cursor_of
from api.services import Services
from api.wire.request_model import RequestModel
from api.wire.sdk_version import listed_segments
from contracts.paths import CheckpointPath, Segment, parse_path
from store.tables import Checkpoint
from tenants import checkpoints
from tenants.runs import get_run

router = APIRouter(tags=["checkpoints"])

CheckpointType = Literal["training", "sampler", "external"]

_TYPES: dict[Segment, CheckpointType] = {
    Segment.WEIGHTS: "training",
    Segment.SAMPLER_WEIGHTS: "sampler",
    Segment.EXTERNAL_WEIGHTS: "external",
}


class CheckpointInfo(BaseModel):
    """A checkpoint. ``checkpoint_id`` is ``{segment}/{name}`` within the run."""

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None
    expires_at: datetime | None


class CheckpointList(BaseModel):
    """Checkpoints, newest first; ``cursor`` is null when the list is complete."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class TtlRequest(RequestModel):
    """Time to live: ``ttl_seconds`` from now, or null to keep the checkpoint for ever."""

    ttl_seconds: int | None


def checkpoint_info(row: Checkpoint) -> CheckpointInfo:
    """Return the answer's form of a database row."""
    path = checkpoints.path_of(row)
    return CheckpointInfo(
        checkpoint_id=path.checkpoint_id,
        checkpoint_type=_TYPES[path.segment],
        time=row.created_at,
        tinker_path=str(path),
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata=row.user_metadata,
        expires_at=row.expires_at,
    )


def _address(run_id: str, checkpoint_id: str) -> CheckpointPath:
    return parse_path(f"tinker://{run_id}/{checkpoint_id}", field="checkpoint_id")


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(caller: Reader, services: Services, run_id: PathId, request: Request) -> CheckpointList:
    """List every checkpoint of the run. Raises ``NotFound``."""
    async with services.runtime.database.read() as session:
        run = await get_run(session, caller.reach, run_id)
        rows, _ = await checkpoints.list_checkpoints(
            session, caller.reach, clock=services.runtime.clock, segments=listed_segments(request), run_id=run.id
        )
    return CheckpointList(checkpoints=[checkpoint_info(row) for row in rows])


@router.get("/checkpoints")
async def list_checkpoints(caller: Reader, services: Services, page: Page, request: Request) -> CheckpointList:
    """List a page of the caller's checkpoints over all runs."""
    async with services.runtime.database.read() as session:
        rows, total = await checkpoints.list_checkpoints(
            session,
            caller.reach,
            clock=services.runtime.clock,
            segments=listed_segments(request),
            limit=page.limit,
            offset=page.offset,
        )
    return CheckpointList(checkpoints=[checkpoint_info(row) for row in rows], cursor=cursor_of(page, total))


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}", status_code=204)
async def delete_checkpoint(
    caller: CheckpointWriter, services: Services, run_id: PathId, checkpoint_id: PathId
) -> None:
    """Delete the checkpoint. Its files go once no sample and no replay reads them.

    Raises ``NotFound``, and ``InvalidRequest`` unless the id is ``{segment}/{name}``.
    """
    path = _address(run_id, checkpoint_id)
    async with services.runtime.database.write() as transaction:
        await checkpoints.delete_checkpoint(transaction, caller.reach, path, services.runtime.clock)


@router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl", status_code=204)
async def set_ttl(
    caller: CheckpointWriter,
    services: Services,
    run_id: PathId,
    checkpoint_id: PathId,
    body: Annotated[TtlRequest, json_body(TtlRequest)],
) -> None:
    """Set the time to live of a checkpoint, or keep it for ever. Raises ``NotFound``, ``InvalidRequest``."""
    path = _address(run_id, checkpoint_id)
    async with services.runtime.database.write() as transaction:
        await checkpoints.set_ttl(
            transaction, caller.reach, path, ttl_seconds=body.ttl_seconds, clock=services.runtime.clock
        )
