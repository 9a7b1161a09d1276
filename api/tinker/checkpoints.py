"""Endpoints of a tenant's checkpoints: list, delete, set the time to live."""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import CheckpointWriter, Reader
from api.checkpoint_records import CheckpointInfo, checkpoint_info
from api.json_body import PathId, json_body
from api.long_lists import encoded_list, long_answer
from api.paging import Cursor, Page, cursor_of
from api.services import Services
from api.wire.request_model import RequestModel
from api.wire.sdk_version import listed_segments
from contracts.paths import CheckpointPath, parse_path
from tenants import checkpoint_changes, checkpoints
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoint_lists import CheckpointFilter, checkpoint_pages, count_checkpoints
from tenants.runs import get_run
from tenants.storage import longest_kept

router = APIRouter(tags=["checkpoints"])


class CheckpointList(BaseModel):
    """Checkpoints, newest first; ``cursor`` is null when the list is complete."""

    checkpoints: list[CheckpointInfo]
    cursor: Cursor | None = None


class TtlRequest(RequestModel):
    """Time to live: ``ttl_seconds`` from now, or null to keep the checkpoint for ever."""

    ttl_seconds: int | None


def address_of(run_id: str, checkpoint_id: str) -> CheckpointPath:
    """Return the checkpoint's path. Raises ``InvalidRequest`` unless the id is ``{segment}/{name}``."""
    return parse_path(f"tinker://{run_id}/{checkpoint_id}", field="checkpoint_id")


@router.get("/training_runs/{run_id}/checkpoints", response_model=CheckpointList)
async def list_run_checkpoints(caller: Reader, services: Services, run_id: PathId, request: Request) -> Response:
    """List every checkpoint of the run. Raises ``NotFound``."""
    segments, now = listed_segments(request), services.runtime.clock()
    async with services.runtime.database.survey() as session:
        run = await get_run(session, caller.reach, run_id)
        pages = checkpoint_pages(session, CheckpointFilter(caller.reach, now, segments, run_id=run.id))
        listed = await encoded_list(pages, lambda row: checkpoint_info(row).model_dump(mode="json"))
    return long_answer(checkpoints=listed, cursor=None)


@router.get("/checkpoints", response_model=CheckpointList)
async def list_checkpoints(caller: Reader, services: Services, page: Page, request: Request) -> Response:
    """List a page of the caller's checkpoints over all runs."""
    which = CheckpointFilter(caller.reach, services.runtime.clock(), listed_segments(request))
    async with services.runtime.database.survey() as session:
        total = await count_checkpoints(session, which)
        pages = checkpoint_pages(session, which, limit=page.limit, offset=page.offset)
        listed = await encoded_list(pages, lambda row: checkpoint_info(row).model_dump(mode="json"))
    return long_answer(checkpoints=listed, cursor=cursor_of(page, total).model_dump())


@router.delete("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}", status_code=204)
async def delete_checkpoint(
    caller: CheckpointWriter, services: Services, run_id: PathId, checkpoint_id: PathId
) -> None:
    """Delete the checkpoint. Its files go once no sample and no replay reads them.

    Raises ``NotFound``, and ``InvalidRequest`` unless the id is ``{segment}/{name}``.
    """
    path = address_of(run_id, checkpoint_id)
    async with services.runtime.database.write() as transaction:
        if await checkpoints.delete_checkpoint(transaction, caller.reach, path, services.runtime.clock):
            await record_act(
                transaction,
                services,
                caller,
                Action.CHECKPOINT_DELETE,
                str(path),
                session_id=session_of(path.run_id),
            )


@router.put("/training_runs/{run_id}/checkpoints/{checkpoint_id:path}/ttl", status_code=204)
async def set_ttl(
    caller: CheckpointWriter,
    services: Services,
    run_id: PathId,
    checkpoint_id: PathId,
    body: Annotated[TtlRequest, json_body(TtlRequest)],
) -> None:
    """Set the time to live of a checkpoint, or keep it as long as the limits of tenant and project let it be kept.

    Raises ``NotFound``, ``InvalidRequest``.
    """
    path = address_of(run_id, checkpoint_id)
    async with services.runtime.database.write() as transaction:
        longest = await longest_kept(transaction, caller.tenant, session_of(path.run_id), services.limits)
        before, after = await checkpoint_changes.set_ttl(
            transaction,
            caller.reach,
            path,
            ttl_seconds=body.ttl_seconds,
            clock=services.runtime.clock,
            longest=longest,
        )
        await record_act(
            transaction,
            services,
            caller,
            Action.CHECKPOINT_SET,
            str(path),
            session_id=session_of(path.run_id),
            before={"expires_at": before},
            after={"expires_at": after},
        )
