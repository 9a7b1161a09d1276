"""Endpoints of a tenant's webhooks: addresses to which weft sends what happens, signed as Standard Webhooks are."""

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import WebhookAdmin
from api.json_body import json_body
from api.services import ApiServices, Services
from api.webhook_records import (
    MOST_EVENTS,
    WebhookBody,
    WebhookEventBody,
    WebhookSecretBody,
    WebhookState,
    webhook_bodies,
    webhook_event_body,
)
from api.wire.request_model import NO_NUL
from contracts.errors import Forbidden
from tenants import webhooks
from tenants.audit_actions import Action
from tenants.rights import Principal

router = APIRouter(tags=["webhooks"])

Name = Annotated[str, Path(pattern=NO_NUL, max_length=100)]
EventId = Annotated[str, Path(pattern=NO_NUL, max_length=64)]
Before = Annotated[int | None, Query(ge=1, le=2**31 - 1)]
"""Number of the last event of the page before."""
IdempotencyKey = Annotated[str | None, Header(max_length=200)]


class WebhookList(BaseModel):
    """Webhooks by their names."""

    webhooks: list[WebhookBody]


class WebhookEventList(BaseModel):
    """Events, the newest first. ``next_before`` is what the next page asks for as ``before``; null on the last one."""

    events: list[WebhookEventBody]
    next_before: int | None


@router.get("/webhooks")
async def list_own_webhooks(caller: WebhookAdmin, services: Services) -> WebhookList:
    """List the tenant's webhooks. Raises ``Forbidden`` for a key of some projects."""
    _check_whole(caller)
    async with services.runtime.database.read() as session:
        found = await webhooks.list_webhooks(session, caller.tenant)
        return WebhookList(webhooks=await webhook_bodies(session, found))


@router.put("/webhooks/{name}")
async def set_own_webhook(
    caller: WebhookAdmin,
    services: Services,
    name: Name,
    body: Annotated[WebhookState, json_body(WebhookState)],
) -> WebhookBody:
    """Make a webhook, or change what is given of it. Its secret is at ``/webhooks/{name}/secret``.

    Raises ``InvalidRequest``, ``Forbidden`` for a key of some projects.
    """
    return await change_webhook(caller, services, name, body)


async def change_webhook(
    caller: Principal, services: ApiServices, name: str, body: WebhookState, *, is_new: bool = False
) -> WebhookBody:
    """Make a webhook, or change what ``body`` has of it; ``is_new``: one that is there already is refused.

    Raises ``InvalidRequest``, ``Forbidden`` for a key of some projects.
    """
    _check_whole(caller)
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        done = await webhooks.set_webhook(
            transaction,
            caller.tenant,
            name,
            body.spec(),
            networks=runtime.settings.webhook_networks,
            defaults=services.limits,
            now=runtime.clock(),
            is_new=is_new,
        )
        after = webhooks.webhook_told(done.webhook)
        if done.before != after:
            await record_act(transaction, services, caller, Action.WEBHOOK_SET, name, before=done.before, after=after)
        return (await webhook_bodies(transaction, [done.webhook]))[0]


@router.delete("/webhooks/{name}", status_code=204)
async def delete_own_webhook(caller: WebhookAdmin, services: Services, name: Name) -> None:
    """Delete a webhook, with the events that wait for it; one that is gone stays so. Raises ``Forbidden``."""
    _check_whole(caller)
    async with services.runtime.database.write() as transaction:
        gone = await webhooks.delete_webhook(transaction, caller.tenant, name)
        if gone is not None:
            told = webhooks.webhook_told(gone)
            await record_act(transaction, services, caller, Action.WEBHOOK_DELETE, name, before=told)


@router.get("/webhooks/{name}/secret")
async def read_webhook_secret(caller: WebhookAdmin, services: Services, name: Name) -> WebhookSecretBody:
    """Return the webhook's newest secret, which the receiver checks signatures with. Raises ``NotFound``, ``Forbidden``."""
    _check_whole(caller)
    async with services.runtime.database.write() as transaction:
        found = await webhooks.get_webhook(transaction, caller.tenant, name)
        secret = webhooks.signing_secrets(found, services.runtime.clock())[0]
        await record_act(transaction, services, caller, Action.WEBHOOK_READ, name)
    return WebhookSecretBody(name=name, secret=secret)


@router.post("/webhooks/{name}/secret")
async def rotate_webhook_secret(
    caller: WebhookAdmin, services: Services, name: Name, idempotency_key: IdempotencyKey = None
) -> WebhookSecretBody:
    """Give the webhook another secret. For a day what is sent has signatures of both.

    A repeat with the same ``Idempotency-Key`` returns the first one's. Raises ``NotFound``, ``Forbidden``,
    ``InvalidRequest`` for a fifth rotation in a day.
    """
    _check_whole(caller)
    async with services.runtime.database.write() as transaction:
        found = await webhooks.get_webhook(transaction, caller.tenant, name, for_change=True)
        repeat = webhooks.repeat_of(f"key {caller.key_id}", idempotency_key)
        made = await webhooks.rotate_secret(transaction, found, services.runtime.clock(), repeat)
        if not made.is_repeat:
            await record_act(transaction, services, caller, Action.WEBHOOK_ROTATE, name)
    return WebhookSecretBody(name=name, secret=made.secret)


@router.post("/webhooks/{name}/test")
async def send_test_event(
    caller: WebhookAdmin, services: Services, name: Name, idempotency_key: IdempotencyKey = None
) -> WebhookEventBody:
    """Send a test event to the webhook. A repeat with the same ``Idempotency-Key`` sends no other.

    Raises ``NotFound``, ``Forbidden``, ``InvalidRequest`` where as many events wait as may.
    """
    _check_whole(caller)
    async with services.runtime.database.write() as transaction:
        found = await webhooks.get_webhook(transaction, caller.tenant, name, for_change=True)
        repeat = webhooks.repeat_of(f"key {caller.key_id}", idempotency_key)
        sent = await webhooks.send_test(transaction, found, services.runtime.clock(), repeat)
        if not sent.is_repeat:
            await record_act(transaction, services, caller, Action.WEBHOOK_TEST, name)
        return webhook_event_body(sent.event)


@router.get("/webhooks/{name}/events")
async def list_webhook_events(
    caller: WebhookAdmin, services: Services, name: Name, before: Before = None
) -> WebhookEventList:
    """List the webhook's events, the newest first, with how their delivery went. Raises ``NotFound``, ``Forbidden``."""
    _check_whole(caller)
    async with services.runtime.database.read() as session:
        found = await webhooks.get_webhook(session, caller.tenant, name)
        rows = await webhooks.list_events(session, found, before=before, most=MOST_EVENTS)
    further = rows[-1].id if len(rows) == MOST_EVENTS else None
    return WebhookEventList(events=[webhook_event_body(one) for one in rows], next_before=further)


@router.post("/webhooks/{name}/events/{event_id}/retry")
async def retry_webhook_event(
    caller: WebhookAdmin, services: Services, name: Name, event_id: EventId
) -> WebhookEventBody:
    """Send an event to the webhook once more, under the same id. Raises ``NotFound``, ``Forbidden``."""
    _check_whole(caller)
    async with services.runtime.database.write() as transaction:
        found = await webhooks.get_webhook(transaction, caller.tenant, name)
        event = await webhooks.get_event(transaction, found, event_id)
        sent = await webhooks.send_again(transaction, event, services.runtime.clock())
        await record_act(transaction, services, caller, Action.WEBHOOK_RETRY, name, after={"event": event_id})
        return webhook_event_body(sent)


def _check_whole(caller: Principal) -> None:
    if caller.projects is not None:
        raise Forbidden(
            "this key is for some projects, and webhooks tell of the whole tenant; use a key without that bound"
        )
