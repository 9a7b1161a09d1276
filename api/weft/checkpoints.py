"""Endpoints of many checkpoints at once: list those that are so, with the samplers that draw from them, and delete."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.acting import record_acts
from api.authentication import CheckpointWriter, Reader
from api.checkpoint_records import CheckpointInfo, CheckpointType, checkpoint_info, segment_of
from api.json_body import json_body
from api.paging import Cursor, CursorPage, cursor_of, next_cursor
from api.route_bounds import METADATA_BODY, bounded
from api.services import Services
from api.wire.request_model import NO_NUL, ListOf, PlainText, RequestModel
from contracts.paths import Segment, parse_path
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoints import MAX_TTL, delete_checkpoints, list_checkpoints
from tenants.samplers import count_samplers

router = APIRouter(tags=["checkpoints"])

MOST_PATHS = 1000


class CheckpointPaths(RequestModel):
    """Paths of checkpoints, ``tinker://run/segment/name``."""

    paths: Annotated[ListOf[PlainText], Field(min_length=1, max_length=MOST_PATHS)]


class DeletedCheckpoints(BaseModel):
    """Number of checkpoints that were deleted, and the paths at which the caller has none, any more or ever."""

    deleted: int
    missing: list[str]


class KeptCheckpoint(CheckpointInfo):
    """A checkpoint of ``run``. ``samplers``: samplers of open sessions that draw from it now."""

    run: str
    samplers: int


class KeptCheckpoints(BaseModel):
    """A page of checkpoints, newest first. ``next_cursor``: of the next page, null on the last one."""

    checkpoints: list[KeptCheckpoint]
    cursor: Cursor
    next_cursor: str | None


@router.get("/checkpoints")
async def list_kept(
    caller: Reader,
    services: Services,
    page: CursorPage,
    run: Annotated[str | None, Query(max_length=150, pattern=NO_NUL)] = None,
    type: CheckpointType | None = None,
    name: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None,
    public: bool | None = None,
    expires_within: Annotated[int | None, Query(gt=0, le=int(MAX_TTL.total_seconds()))] = None,
) -> KeptCheckpoints:
    """List a page of the caller's checkpoints: of one run, type or name, published or not, or that expire within some seconds.

    Raises ``InvalidRequest`` for a wrong cursor.
    """
    clock = services.runtime.clock
    async with services.runtime.database.survey() as session:
        rows, total = await list_checkpoints(
            session,
            caller.reach,
            clock=clock,
            segments=tuple(Segment) if type is None else (segment_of(type),),
            run_id=run,
            name=name,
            public=public,
            expires_before=None if expires_within is None else clock() + timedelta(seconds=expires_within),
            limit=page.limit + 1,
            offset=page.offset,
            after=page.after,
        )
        following, rows = next_cursor(page, rows), rows[: page.limit]
        samplers = await count_samplers(session, caller.reach, [row.id for row in rows])
    kept = [
        KeptCheckpoint(**dict(checkpoint_info(row)), run=row.run_id, samplers=samplers.get(row.id, 0)) for row in rows
    ]
    return KeptCheckpoints(checkpoints=kept, cursor=cursor_of(page, total), next_cursor=following)


@router.post("/checkpoints/delete")
@bounded(body=METADATA_BODY, goes_on=True)
async def delete_many(
    caller: CheckpointWriter, services: Services, body: Annotated[CheckpointPaths, json_body(CheckpointPaths)]
) -> DeletedCheckpoints:
    """Delete up to 1,000 checkpoints, all or none if the answer is an error. A repeat tells them as missing.

    Raises ``InvalidRequest`` for a path that is none.
    """
    paths = list(dict.fromkeys(parse_path(path, field="paths") for path in body.paths))
    async with services.runtime.database.write() as transaction:
        missing = await delete_checkpoints(transaction, caller.reach, paths, services.runtime.clock)
        absent = set(missing)
        deleted = [(str(path), session_of(path.run_id)) for path in paths if path not in absent]
        await record_acts(transaction, services, caller, Action.CHECKPOINT_DELETE, deleted)
    return DeletedCheckpoints(deleted=len(paths) - len(missing), missing=[str(path) for path in missing])
