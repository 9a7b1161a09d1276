"""Checkpoints of all tenants for operators: list, show and delete them."""

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, PathId, QueryText, listed
from api.admin.services import Admin, Caller
from contracts.errors import NotFound
from contracts.ids import TenantId
from contracts.paths import CheckpointPath, Segment, parse_path
from store.tables import Checkpoint, Run
from tenants.audit import session_of
from tenants.audit_actions import Action
from tenants.checkpoints import MAX_TTL, delete_checkpoint, is_unexpired, path_of
from tenants.pages import page_of

router = APIRouter(tags=["checkpoints"])


class CheckpointBody(BaseModel):
    """A checkpoint of a tenant. ``listed`` false: its tenant's lists leave it out, since a sampler made it for itself."""

    id: str
    tenant_id: str
    run: str
    path: str
    size_bytes: int
    listed: bool
    public: bool
    created_at: datetime
    expires_at: datetime | None


@router.get("/checkpoints")
async def list_all_checkpoints(
    caller: Caller,
    admin: Admin,
    tenant_id: QueryText = None,
    run: QueryText = None,
    expires_within: Annotated[int | None, Query(gt=0, le=int(MAX_TTL.total_seconds()))] = None,
    after: After = None,
    limit: Limit = 50,
) -> Listed[CheckpointBody]:
    """List checkpoints that have not expired: of a tenant or a run, or those that expire within some seconds."""
    del caller
    now = await admin.now()
    conditions: list[ColumnElement[bool]] = [is_unexpired(now)]
    wanted = ((Checkpoint.tenant_id, tenant_id), (Checkpoint.run_id, run))
    conditions += [column == value for column, value in wanted if value is not None]
    if expires_within is not None:
        conditions.append(Checkpoint.expires_at < now + timedelta(seconds=expires_within))
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Checkpoint, *conditions, after=after, most=limit + 1)
    return listed([_body(row) for row in rows], limit, [row.id for row in rows])


@router.get("/checkpoints/{run_id}/{segment}/{name}")
async def show_checkpoint(
    caller: Caller, admin: Admin, run_id: PathId, segment: Segment, name: PathId
) -> CheckpointBody:
    """Show a checkpoint, also one that has expired and is not removed yet. Raises ``NotFound``, ``InvalidRequest``."""
    del caller
    path = _address(run_id, segment, name)
    found = select(Checkpoint).where(
        Checkpoint.run_id == path.run_id, Checkpoint.segment == path.segment, Checkpoint.name == path.name
    )
    async with admin.runtime.database.read() as session:
        row = await session.scalar(found)
    if row is None:
        raise _missing(path)
    return _body(row)


@router.delete("/checkpoints/{run_id}/{segment}/{name}", status_code=204)
async def remove_checkpoint(
    caller: Caller, admin: Admin, request: Request, run_id: PathId, segment: Segment, name: PathId
) -> None:
    """Delete a checkpoint, as its tenant may; its files go once nothing reads them. A repeat changes nothing.

    Raises ``NotFound``, ``InvalidRequest``.
    """
    path = _address(run_id, segment, name)
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant_of(transaction, path)
        if await delete_checkpoint(transaction, tenant, path, admin.runtime.clock):
            lane = session_of(path.run_id)
            await record_operator(
                transaction,
                admin,
                request,
                caller,
                Action.CHECKPOINT_DELETE,
                str(path),
                tenant=tenant,
                session_id=lane,
            )


async def _tenant_of(session: AsyncSession, path: CheckpointPath) -> TenantId:
    run = await session.get(Run, path.run_id)
    if run is None:
        raise _missing(path)
    return TenantId(run.tenant_id)


def _address(run_id: str, segment: Segment, name: str) -> CheckpointPath:
    return parse_path(f"tinker://{run_id}/{segment}/{name}")


def _missing(path: CheckpointPath) -> NotFound:
    return NotFound(f"no checkpoint {str(path)[:400]!r}; `weft checkpoint list` shows them")


def _body(row: Checkpoint) -> CheckpointBody:
    return CheckpointBody(
        id=row.id,
        tenant_id=row.tenant_id,
        run=row.run_id,
        path=str(path_of(row)),
        size_bytes=row.size_bytes,
        listed=row.listed,
        public=row.public,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
