"""Entries of the audit log about what a request does."""

from collections.abc import Mapping, Sequence

from sqlalchemy.ext.asyncio import AsyncSession

from api.services import ApiServices
from telemetry.context import current_work
from tenants.audit import Actor, actor_of, record, record_many
from tenants.audit_actions import Action
from tenants.rights import Principal


def acting(caller: Principal) -> Actor:
    """Return the actor of the current request, by its principal."""
    return actor_of(caller, trace_id=current_work().trace_id)


async def record_act(
    transaction: AsyncSession,
    services: ApiServices,
    caller: Principal,
    action: Action,
    resource_id: str,
    *,
    project: str | None = None,
    session_id: str | None = None,
    before: Mapping[str, object] | None = None,
    after: Mapping[str, object] | None = None,
    is_counted: bool = False,
) -> None:
    """Write an entry about what the caller does to a thing of its tenant, in the transaction that does it.

    ``is_counted``: the change was counted already, before the work for it. Raises ``OverRate`` for a tenant that changes too
    much. A key is revoked all the same: its thief may be who changes so much.
    """
    if not is_counted and action is not Action.KEY_REVOKE:
        services.admission.changes.count(caller.tenant)
    await record(
        transaction,
        acting(caller),
        action,
        resource_id,
        tenant=caller.tenant,
        now=services.runtime.clock(),
        project=project,
        session_id=session_id,
        before=before,
        after=after,
    )


async def record_acts(
    transaction: AsyncSession,
    services: ApiServices,
    caller: Principal,
    action: Action,
    resources: Sequence[tuple[str, str | None]],
) -> None:
    """Write an entry about each of the resources, given with its client's session if it has one, as ``record_act`` does.

    Raises ``OverRate`` for a tenant that changes too much; then none of them is counted.
    """
    services.admission.changes.count(caller.tenant, len(resources))
    now = services.runtime.clock()
    await record_many(transaction, acting(caller), action, resources, tenant=caller.tenant, now=now)
