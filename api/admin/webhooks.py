"""Webhooks of tenants for operators: list, set, delete, sign, test, and see how deliveries went."""

from typing import Annotated

from fastapi import APIRouter, Request
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import AfterNumber, IdempotencyKey, Limit, Listed, PathId, listed, operator_body
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row
from api.webhook_records import (
    MOST_EVENTS,
    WebhookBody,
    WebhookEventBody,
    WebhookSecretBody,
    WebhookState,
    webhook_bodies,
    webhook_event_body,
)
from contracts.ids import TenantId
from tenants import webhooks
from tenants.audit_actions import Action

router = APIRouter(tags=["webhooks"])


@router.get("/tenants/{tenant_id}/webhooks")
async def list_tenants_webhooks(caller: Caller, admin: Admin, tenant_id: PathId) -> Listed[WebhookBody]:
    """List a tenant's webhooks by their names; all in one page. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        found = await webhooks.list_webhooks(session, await _tenant(session, tenant_id))
        return Listed(items=await webhook_bodies(session, found))


@router.put("/tenants/{tenant_id}/webhooks/{name}")
async def set_webhook(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    name: PathId,
    body: Annotated[WebhookState, operator_body(WebhookState)],
) -> WebhookBody:
    """Make a webhook of a tenant, or change what is given of it. Raises ``NotFound``, ``InvalidRequest``."""
    runtime = admin.runtime
    async with runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        done = await webhooks.set_webhook(
            transaction,
            tenant,
            name,
            body.spec(),
            networks=runtime.settings.webhook_networks,
            defaults=admin.limits,
            now=runtime.clock(),
        )
        before, after = done.before, webhooks.webhook_told(done.webhook)
        if before != after:
            await record_operator(
                transaction,
                admin,
                request,
                caller,
                Action.WEBHOOK_SET,
                name,
                tenant=tenant,
                before=before,
                after=after,
            )
        return (await webhook_bodies(transaction, [done.webhook]))[0]


@router.delete("/tenants/{tenant_id}/webhooks/{name}", status_code=204)
async def delete_webhook(caller: Caller, admin: Admin, request: Request, tenant_id: PathId, name: PathId) -> None:
    """Delete a tenant's webhook, with the events that wait for it; one that is gone stays so. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        gone = await webhooks.delete_webhook(transaction, tenant, name)
        if gone is not None:
            told, action = webhooks.webhook_told(gone), Action.WEBHOOK_DELETE
            await record_operator(transaction, admin, request, caller, action, name, tenant=tenant, before=told)


@router.get("/tenants/{tenant_id}/webhooks/{name}/secret")
async def read_secret(
    caller: Caller, admin: Admin, request: Request, tenant_id: PathId, name: PathId
) -> WebhookSecretBody:
    """Return the newest secret of a tenant's webhook. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        found = await webhooks.get_webhook(transaction, tenant, name)
        secret = webhooks.signing_secrets(found, admin.runtime.clock())[0]
        await record_operator(transaction, admin, request, caller, Action.WEBHOOK_READ, name, tenant=tenant)
    return WebhookSecretBody(name=name, secret=secret)


@router.post("/tenants/{tenant_id}/webhooks/{name}/secret")
async def rotate_secret(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    name: PathId,
    idempotency_key: IdempotencyKey = None,
) -> WebhookSecretBody:
    """Give a tenant's webhook another secret; the one before signs beside it for a day.

    A repeat with the same ``Idempotency-Key`` returns the first one's. Raises ``NotFound``, ``InvalidRequest`` for a fifth
    rotation in a day.
    """
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        found = await webhooks.get_webhook(transaction, tenant, name, for_change=True)
        repeat = webhooks.repeat_of(f"operator {caller.name}", idempotency_key)
        made = await webhooks.rotate_secret(transaction, found, admin.runtime.clock(), repeat)
        if not made.is_repeat:
            await record_operator(transaction, admin, request, caller, Action.WEBHOOK_ROTATE, name, tenant=tenant)
    return WebhookSecretBody(name=name, secret=made.secret)


@router.post("/tenants/{tenant_id}/webhooks/{name}/test")
async def send_test(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    name: PathId,
    idempotency_key: IdempotencyKey = None,
) -> WebhookEventBody:
    """Send a test event to a tenant's webhook. A repeat with the same ``Idempotency-Key`` sends no other.

    Raises ``NotFound``, ``InvalidRequest`` where as many events wait as may.
    """
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        found = await webhooks.get_webhook(transaction, tenant, name, for_change=True)
        repeat = webhooks.repeat_of(f"operator {caller.name}", idempotency_key)
        sent = await webhooks.send_test(transaction, found, admin.runtime.clock(), repeat)
        if not sent.is_repeat:
            await record_operator(transaction, admin, request, caller, Action.WEBHOOK_TEST, name, tenant=tenant)
        return webhook_event_body(sent.event)


@router.get("/tenants/{tenant_id}/webhooks/{name}/events")
async def list_events(
    caller: Caller,
    admin: Admin,
    tenant_id: PathId,
    name: PathId,
    limit: Limit = MOST_EVENTS,
    after: AfterNumber = 0,
) -> Listed[WebhookEventBody]:
    """List the events of a tenant's webhook, the newest first, with how their delivery went. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        found = await webhooks.get_webhook(session, await _tenant(session, tenant_id), name)
        rows = await webhooks.list_events(session, found, before=after or None, most=limit + 1)
    return listed([webhook_event_body(one) for one in rows], limit, [str(one.id) for one in rows])


@router.post("/tenants/{tenant_id}/webhooks/{name}/events/{event_id}/retry")
async def retry_event(
    caller: Caller, admin: Admin, request: Request, tenant_id: PathId, name: PathId, event_id: PathId
) -> WebhookEventBody:
    """Send an event to a tenant's webhook once more, under the same id. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        tenant = await _tenant(transaction, tenant_id)
        found = await webhooks.get_webhook(transaction, tenant, name)
        event = await webhooks.get_event(transaction, found, event_id)
        sent = await webhooks.send_again(transaction, event, admin.runtime.clock())
        told = {"event": event_id}
        await record_operator(
            transaction, admin, request, caller, Action.WEBHOOK_RETRY, name, tenant=tenant, after=told
        )
        return webhook_event_body(sent)


async def _tenant(session: AsyncSession, tenant_id: str) -> TenantId:
    return TenantId((await find_row(session, tenant_id)).id)
