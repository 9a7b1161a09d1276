"""Deletion of tenants for operators: mark one, and take that back until the grace time is over."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field

from api.admin.acts import record_operator
from api.admin.bodies import PathId, Reason, operator_body
from api.admin.notes import note_done
from api.admin.services import Admin, Caller
from api.admin.tenants import TenantBody, find_row, tenant_body, wake_workers
from api.wire.request_model import RequestModel
from contracts.ids import TenantId
from store.database_clock import database_now
from telemetry.security import SecurityEvent
from tenants.audit_actions import Action
from tenants.deletion import LONGEST_GRACE, holdings, mark_for_deletion, restore
from tenants.rights import SuspendMode

router = APIRouter(tags=["tenants"])

_MOST_SECONDS = int(LONGEST_GRACE.total_seconds())


class DeletionRequest(RequestModel):
    """Deletion of a tenant after ``grace_seconds`` (null: ``WEFT_DELETION_GRACE``).

    ``mode``: ``read_only`` lets the tenant export until then, ``blocked`` refuses it everything.
    """

    grace_seconds: Annotated[int, Field(ge=0, le=_MOST_SECONDS)] | None = None
    mode: SuspendMode = SuspendMode.BLOCKED
    reason: Reason = ""


class MarkedTenant(TenantBody):
    """A tenant that is to be deleted, and the checkpoints that go with it: export before ``delete_at`` what is to stay."""

    checkpoints: int
    stored_bytes: int


@router.put("/tenants/{tenant_id}/deletion")
async def mark(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    body: Annotated[DeletionRequest, operator_body(DeletionRequest)],
) -> MarkedTenant:
    """Suspend a tenant, and have what it has removed once the grace time is over. Usage and audit stay.

    Raises ``NotFound``, ``InvalidRequest`` once the removal has begun.
    """
    runtime = admin.runtime
    given = body.grace_seconds
    grace = runtime.settings.deletion_grace if given is None else timedelta(seconds=given)
    async with runtime.database.write() as transaction:
        found = await find_row(transaction, tenant_id, for_change=True)
        # Read once the row is locked, and the clock of housekeeping: what is not due now is not being removed.
        now = await database_now(transaction, runtime.clock)
        await mark_for_deletion(transaction, found, grace=grace, mode=body.mode, reason=body.reason or None, now=now)
        told = {"delete_at": now + grace, "mode": body.mode, "reason": body.reason or None}
        await record_operator(
            transaction, admin, request, caller, Action.TENANT_DELETE, found.id, tenant=found.id, after=told
        )
        await wake_workers(admin, transaction)
        shown = tenant_body(await find_row(transaction, tenant_id))
        stored = await holdings(transaction, TenantId(tenant_id))
    note_done(request, caller, SecurityEvent.TENANT_MARKED, shown.name, tenant=shown.id, detail=body.reason or None)
    return MarkedTenant(**shown.model_dump(), checkpoints=stored.checkpoints, stored_bytes=stored.nbytes)


@router.delete("/tenants/{tenant_id}/deletion")
async def unmark(caller: Caller, admin: Admin, request: Request, tenant_id: PathId) -> TenantBody:
    """Take back a deletion. The tenant's work goes on, unless it was suspended before.

    Raises ``NotFound``, ``InvalidRequest`` for a tenant that is not marked, or whose removal has begun.
    """
    runtime = admin.runtime
    async with runtime.database.write() as transaction:
        found = await find_row(transaction, tenant_id, for_change=True)
        await restore(transaction, found, await database_now(transaction, runtime.clock))
        await record_operator(transaction, admin, request, caller, Action.TENANT_RESTORE, found.id, tenant=found.id)
        await wake_workers(admin, transaction)
        shown = tenant_body(await find_row(transaction, tenant_id))
    note_done(request, caller, SecurityEvent.TENANT_RESTORED, shown.name, tenant=shown.id)
    return shown
