"""Entries of the audit log about what operators do, over the admin API or by a command on the database."""

from collections.abc import Mapping

from fastapi import Request
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.services import AdminServices
from api.security_events import source_of
from contracts.ids import TenantId
from telemetry.context import current_work
from tenants.audit import Actor, Door, record
from tenants.audit_actions import Action
from tenants.audit_tally import Repeated
from tenants.operator_keys import Operator


async def record_operator(
    transaction: AsyncSession,
    admin: AdminServices,
    request: Request,
    operator: Operator,
    action: Action,
    resource_id: str,
    *,
    tenant: str | None,
    project: str | None = None,
    session_id: str | None = None,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> None:
    """Write an entry about what the operator does, in the transaction that does it. ``tenant`` None: to the service's own."""
    await record(
        transaction,
        _acting(request, operator),
        action,
        resource_id,
        tenant=None if tenant is None else TenantId(tenant),
        now=admin.runtime.clock(),
        project=project,
        session_id=session_id,
        before=before,
        after=after,
    )


async def note_operators_read(
    admin: AdminServices, request: Request, operator: Operator, action: Action, *, tenant: TenantId | None
) -> None:
    """Count a read of what is sensitive; a command, whose process ends with it, makes an entry of its own.

    ``tenant`` None: what all tenants have together.
    """
    what = request.url.path
    if operator.key_id is None:
        async with admin.runtime.database.write() as transaction:
            await record_operator(transaction, admin, request, operator, action, what, tenant=tenant)
        return
    actor = _acting(request, operator)
    admin.audit_tally.note(Repeated(action=action, actor=actor, tenant=tenant, resource_id=what, cause="read"))


def _acting(request: Request, operator: Operator) -> Actor:
    is_command = operator.key_id is None
    return Actor(
        Door.CLI if is_command else Door.UI if operator.is_browser else Door.ADMIN,
        operator.name,
        operator.key_id,
        operator.role,
        None if is_command else source_of(request),
        current_work().trace_id,
    )
