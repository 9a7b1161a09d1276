"""Entries of the audit log about what operators do by commands."""

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from cli.operator_log import operator
from contracts.ids import TenantId
from store.clock import utc_now
from tenants.audit import Actor, Door, record
from tenants.audit_actions import Action


async def record_command(
    transaction: AsyncSession,
    action: Action,
    resource_id: str,
    *,
    tenant: str | None,
    project: str | None = None,
    session_id: str | None = None,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
) -> None:
    """Write an entry about what this command's operator does, in the transaction that does it.

    ``tenant`` None: to the service's own.
    """
    await record(
        transaction,
        Actor(Door.CLI, operator()),
        action,
        resource_id,
        tenant=None if tenant is None else TenantId(tenant),
        now=utc_now(),
        project=project,
        session_id=session_id,
        before=before,
        after=after,
    )
