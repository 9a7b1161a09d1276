"""Endpoints of many checkpoints at once: list those that are so, with the samplers that draw from them, and delete."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.acting import record_acts
from api.authentication import CheckpointWriter, Reader
from api.checkpoint_records import CheckpointInfo, CheckpointType, checkpoint_info, segment_of
from api.json_body import json_body
from api.long_lists import encoded_list, long_answer
from api.paging import Cursor, CursorPage, PageRequest, PagesAhead, cursor_of
from api.route_bounds import METADATA_BODY, bounded
from api.services import ApiServices, Services
from api.wire.request_model import NO_NUL, ListOf, PlainText, RequestModel
from contracts.paths import Segment, parse_path
from store.tables import Checkpoint
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoint_lists import CheckpointFilter, checkpoint_pages, count_checkpoints
from tenants.checkpoints import MAX_TTL, delete_checkpoints
from tenants.reach import Owner
from tenants.rights import Principal
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


@dataclass(frozen=True, slots=True)
class KeptFilter:
    """Checkpoints to list: of one run, type or name, published or not, or that expire within some seconds."""

    run: Annotated[str | None, Query(max_length=150, pattern=NO_NUL)] = None
    type: Annotated[CheckpointType | None, Query()] = None
    name: Annotated[str | None, Query(max_length=200, pattern=NO_NUL)] = None
    public: Annotated[bool | None, Query()] = None
    expires_within: Annotated[int | None, Query(gt=0, le=int(MAX_TTL.total_seconds()))] = None

    def of(self, owner: Owner, now: datetime) -> CheckpointFilter:
        """Return the filter of the owner's rows."""
        return CheckpointFilter(
            owner=owner,
            now=now,
            segments=tuple(Segment) if self.type is None else (segment_of(self.type),),
            run_id=self.run,
            name=self.name,
            public=self.public,
            expires_before=None if self.expires_within is None else now + timedelta(seconds=self.expires_within),
        )


@router.get("/checkpoints", response_model=KeptCheckpoints)
async def list_kept(
    caller: Reader, services: Services, page: CursorPage, asked: Annotated[KeptFilter, Depends()]
) -> Response:
    """List a page of the caller's checkpoints: of one run, type or name, published or not, or that expire within some seconds.

    Raises ``InvalidRequest`` for a wrong cursor.
    """
    which = asked.of(caller.reach, services.runtime.clock())
    async with services.runtime.database.survey() as session:
        total, pages = await count_checkpoints(session, which), _pages_ahead(session, which, page)
        listed = await encoded_list(_kept(session, which, pages), lambda kept: kept.model_dump(mode="json"))
    return long_answer(checkpoints=listed, cursor=cursor_of(page, total).model_dump(), next_cursor=pages.next_cursor)


async def kept_checkpoints(
    caller: Principal, services: ApiServices, page: PageRequest, asked: KeptFilter
) -> KeptCheckpoints:
    """Return a page of the caller's checkpoints as records."""
    which = asked.of(caller.reach, services.runtime.clock())
    async with services.runtime.database.survey() as session:
        total, pages = await count_checkpoints(session, which), _pages_ahead(session, which, page)
        kept = [one async for some in _kept(session, which, pages) for one in some]
    return KeptCheckpoints(checkpoints=kept, cursor=cursor_of(page, total), next_cursor=pages.next_cursor)


def _pages_ahead(session: AsyncSession, which: CheckpointFilter, page: PageRequest) -> PagesAhead[Checkpoint]:
    rows = checkpoint_pages(session, which, limit=page.limit + 1, offset=page.offset, after=page.after)
    return PagesAhead(page.limit, rows)


async def _kept(
    session: AsyncSession, which: CheckpointFilter, pages: PagesAhead[Checkpoint]
) -> AsyncIterator[list[KeptCheckpoint]]:
    """Iterate over the checkpoints of the pages with their samplers."""
    async for rows in pages.shown():
        samplers = await count_samplers(session, which.owner, [row.id for row in rows])
        yield [
            KeptCheckpoint(**dict(checkpoint_info(row)), run=row.run_id, samplers=samplers.get(row.id, 0))
            for row in rows
        ]


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
