"""Webhooks of tenants: made, changed, listed, signed for, and deleted."""

import base64
import hashlib
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound
from contracts.ids import TenantId
from contracts.webhooks import EVERY, SECRET_PREFIX, EventKind, Network, check_target
from store.tables import Webhook, WebhookEvent
from tenants.limit_use import WEBHOOK_USE
from tenants.limits import Counted, Limits, hold_count
from tenants.webhook_events import MOST_WAITING, TenantEvent, record_event, waiting_by_webhook

MOST_NOTE = 200
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,49}")
_OVERLAP = timedelta(days=1)
"""Time for which a secret signs beside the one that took its place."""
_MOST_SECRETS = 5
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class WebhookSpec:
    """State that a webhook is to have. None leaves a part as it is; a new webhook gets all events, no note, and is on."""

    url: str | None = None
    events: Collection[str] | None = None
    note: str | None = None
    is_enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class WebhookChange:
    """A webhook after it was set. ``before``: what the audit log tells of it before, None for a new one."""

    webhook: Webhook
    before: dict[str, object] | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Secret that a rotation has made. ``is_repeat``: an earlier request with the same ``Idempotency-Key`` has made it."""

    secret: str
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class SentTest:
    """Test event of a webhook. ``is_repeat``: an earlier request with the same ``Idempotency-Key`` has asked for it."""

    event: WebhookEvent
    is_repeat: bool


def repeat_of(asker: str, idempotency_key: str | None) -> str | None:
    """Return what a request of ``asker`` and its repeats are known by, None without an ``Idempotency-Key``."""
    if not idempotency_key:
        return None
    return hashlib.sha256(f"{asker}\0{idempotency_key}".encode()).hexdigest()[:32]


async def set_webhook(
    transaction: AsyncSession,
    tenant: TenantId,
    name: str,
    spec: WebhookSpec,
    *,
    networks: Sequence[Network],
    defaults: Limits,
    now: datetime,
    is_new: bool = False,
) -> WebhookChange:
    """Make the tenant's webhook of that name, or change what ``spec`` has of it. What waits for it stays.

    ``is_new``: one that is there already is refused. Raises ``InvalidRequest``, also for a new one without a URL, and for one
    more than the tenant's limit.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest("name: a webhook's name has 1 to 50 of a-z, 0-9, - and _, and begins with none of the two")
    if spec.url is not None:
        check_target(spec.url, networks)
    events = None if spec.events is None else _events(spec.events)
    await hold_count(transaction, Counted.WEBHOOKS, [tenant])
    found = await transaction.scalar(_named(tenant, name).with_for_update())
    if found is not None and is_new:
        raise InvalidRequest(f"name: a webhook is named {name!r} already; choose another name, or change that one")
    before = None if found is None else webhook_told(found)
    if found is None:
        if spec.url is None:
            raise InvalidRequest(f"no webhook is named {name!r}; give its url to make it")
        use = await WEBHOOK_USE.of(transaction, tenant, defaults)
        if use.room("webhooks") < 1:
            raise InvalidRequest(f"you have {use.used['webhooks']} webhooks, and your limit is {use.limits.webhooks}")
        made = {"events": [EVERY], "note": "", "secrets": [_fresh()], "created_at": now, "missed": 0}
        found = Webhook(tenant_id=tenant, name=name, **made)
        transaction.add(found)
    _change(found, spec, events, now)
    await transaction.flush()
    return WebhookChange(found, before)


def _change(webhook: Webhook, spec: WebhookSpec, events: list[str] | None, now: datetime) -> None:
    """Give the webhook what ``spec`` has; the rest stays, so two changes of other parts do not undo each other."""
    if spec.url is not None:
        webhook.url = spec.url
    if events is not None:
        webhook.events = events
    if spec.note is not None:
        webhook.note = spec.note
    if spec.is_enabled and webhook.disabled_at is not None:
        webhook.disabled_at = webhook.disabled_reason = None
        # Free at once, and behind those that wait for a delivery.
        webhook.rests_until = now
    elif spec.is_enabled is False and webhook.disabled_at is None:
        webhook.disabled_at = now


def webhook_told(webhook: Webhook) -> dict[str, object]:
    """Return the webhook's state as an entry of the audit log tells it.

    A path or query may be a secret of the receiver: the log has the URL's origin, and a digest that tells two URLs apart.
    """
    parts = urlsplit(webhook.url)
    return {
        "origin": f"{parts.scheme}://{parts.netloc}",
        "url_sha256": hashlib.sha256(webhook.url.encode()).hexdigest()[:16],
        "events": webhook.events,
        "note": webhook.note,
        "is_enabled": webhook.disabled_at is None,
    }


def _events(named: Collection[str]) -> list[str]:
    known = [kind.value for kind in EventKind]
    if unknown := sorted({*named} - {*known, EVERY}):
        raise InvalidRequest(
            f"events: no event is named {unknown[0][:50]!r}; they are {', '.join(known)}, or * for all"
        )
    if not named:
        raise InvalidRequest("events: name at least one, or * for all")
    return [EVERY] if EVERY in named else [one for one in known if one in named]


def _fresh() -> dict[str, Any]:
    return {"secret": SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode(), "until": None}


def signing_secrets(webhook: Webhook, now: datetime) -> list[str]:
    """Return the secrets that sign now, the newest first."""
    return [
        one["secret"] for one in webhook.secrets if one["until"] is None or datetime.fromisoformat(one["until"]) > now
    ]


async def rotate_secret(
    transaction: AsyncSession, webhook: Webhook, now: datetime, repeat: str | None = None
) -> Rotation:
    """Give the webhook another secret; the ones before sign beside it for a day. A ``repeat`` returns the first one's.

    The caller has locked the row. Raises ``InvalidRequest`` for too many rotations in that time.
    """
    if repeat is not None:
        for one in webhook.secrets:
            if one.get("made_by") == repeat:
                return Rotation(one["secret"], is_repeat=True)
    living = [one for one in webhook.secrets if one["secret"] in signing_secrets(webhook, now)]
    if len(living) >= _MOST_SECRETS:
        raise InvalidRequest(f"this webhook has {_MOST_SECRETS} secrets that sign; the oldest one ends within a day")
    made, until = {**_fresh(), "made_by": repeat}, (now + _OVERLAP).isoformat()
    webhook.secrets = [made, *({**one, "until": one["until"] or until} for one in living)]
    await transaction.flush()
    return Rotation(made["secret"], is_repeat=False)


def _named(tenant: TenantId, name: str) -> Any:
    return select(Webhook).where(Webhook.tenant_id == tenant, Webhook.name == name)


async def get_webhook(session: AsyncSession, tenant: TenantId, name: str, *, for_change: bool = False) -> Webhook:
    """Return the tenant's webhook of that name, locked if it is to be changed. Raises ``NotFound``."""
    query = _named(tenant, name)
    found: Webhook | None = await session.scalar(query.with_for_update() if for_change else query)
    if found is None:
        raise NotFound(f"no webhook is named {name[:100]!r}")
    return found


async def list_webhooks(session: AsyncSession, tenant: TenantId) -> list[Webhook]:
    """Return the tenant's webhooks by their names."""
    return list(await session.scalars(select(Webhook).where(Webhook.tenant_id == tenant).order_by(Webhook.name)))


async def last_errors(session: AsyncSession, found: Sequence[Webhook]) -> dict[int, str]:
    """Return why the newest delivery to each of the webhooks failed, leaving out those to which it did not."""
    newest = (
        select(func.max(WebhookEvent.id))
        .where(WebhookEvent.webhook_id.in_([one.id for one in found]), WebhookEvent.attempts > 0)
        .group_by(WebhookEvent.webhook_id)
    )
    failed = select(WebhookEvent.webhook_id, WebhookEvent.last_error).where(
        WebhookEvent.id.in_(newest), WebhookEvent.delivered_at.is_(None), WebhookEvent.last_error.is_not(None)
    )
    return {row.webhook_id: row.last_error for row in await session.execute(failed)}


async def delete_webhook(transaction: AsyncSession, tenant: TenantId, name: str) -> Webhook | None:
    """Delete the tenant's webhook of that name, with its events, and return it; None if there is none."""
    found: Webhook | None = await transaction.scalar(_named(tenant, name).with_for_update())
    if found is None:
        return None
    await transaction.execute(delete(WebhookEvent).where(WebhookEvent.webhook_id == found.id))
    await transaction.execute(delete(Webhook).where(Webhook.id == found.id))
    return found


async def delete_webhooks(transaction: AsyncSession, tenant: TenantId) -> int:
    """Delete all of the tenant's webhooks with their events; return how many there were."""
    # In the order in which whoever tells an event locks them.
    held = select(Webhook.id).where(Webhook.tenant_id == tenant).order_by(Webhook.id).with_for_update()
    found = list(await transaction.scalars(held))
    await transaction.execute(delete(WebhookEvent).where(WebhookEvent.webhook_id.in_(found)))
    await transaction.execute(delete(Webhook).where(Webhook.id.in_(found)))
    return len(found)


async def send_test(transaction: AsyncSession, webhook: Webhook, now: datetime, repeat: str | None = None) -> SentTest:
    """Record a test event for the webhook, whatever events it wants. A ``repeat`` finds the first one's.

    Raises ``InvalidRequest`` while too many events wait for the webhook.
    """
    event = TenantEvent(TenantId(webhook.tenant_id), EventKind.WEBHOOK_TEST, webhook.name, {"webhook": webhook.name})
    event_id = repeat or event.id
    is_new = await record_event(transaction, webhook.id, event_id, event, now)
    if is_new and (await waiting_by_webhook(transaction, [webhook.id]))[webhook.id] > MOST_WAITING:
        raise InvalidRequest(f"{MOST_WAITING} events wait for this webhook; send the test once its receiver takes them")
    return SentTest(await get_event(transaction, webhook, event_id), is_repeat=not is_new)


async def get_event(session: AsyncSession, webhook: Webhook, event_id: str) -> WebhookEvent:
    """Return an event of the webhook. Raises ``NotFound``."""
    found = await session.scalar(
        select(WebhookEvent).where(WebhookEvent.webhook_id == webhook.id, WebhookEvent.event_id == event_id)
    )
    if found is None:
        raise NotFound(f"no event {event_id[:100]!r} of webhook {webhook.name!r}")
    return found


async def list_events(session: AsyncSession, webhook: Webhook, *, before: int | None, most: int) -> list[WebhookEvent]:
    """Return events of the webhook, the newest first, from behind the number ``before``."""
    query = select(WebhookEvent).where(WebhookEvent.webhook_id == webhook.id).order_by(WebhookEvent.id.desc())
    if before is not None:
        query = query.where(WebhookEvent.id < before)
    return list(await session.scalars(query.limit(most)))


async def send_again(transaction: AsyncSession, event: WebhookEvent, now: datetime) -> WebhookEvent:
    """Have an event sent once more, at once, under the same id."""
    again = update(WebhookEvent).where(WebhookEvent.id == event.id).values(due_at=now, attempts=0)
    await transaction.execute(again.execution_options(synchronize_session=False))
    await transaction.refresh(event)
    return event
