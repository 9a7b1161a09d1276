"""Events for tenants' webhooks: recorded in the transaction of what they tell, so that neither is without the other."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Row, Select, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from contracts.errors import WeftError
from contracts.ids import TenantId
from contracts.webhooks import EVERY, EventKind, event_document
from store.inserts import insert_unless_present
from store.tables import ApiKey, Checkpoint, Webhook, WebhookEvent

MOST_WAITING = 1000
"""Most events that wait for one webhook. Further ones are counted as missed."""
CHECKPOINT_NOTICE = timedelta(days=1)
"""Time before a checkpoint's end from which its tenant is told."""
KEY_NOTICE = timedelta(days=3)


@dataclass(frozen=True, slots=True)
class TenantEvent:
    """An event of a tenant. ``about`` and ``until``: thing whose end it announces, and when that is."""

    tenant: TenantId
    kind: EventKind
    subject: str
    data: Mapping[str, object]
    about: str | None = None
    until: datetime | None = None

    @property
    def id(self) -> str:
        """Name of the event: a fresh one, or for the notice of an end always the same."""
        if self.until is None:
            return uuid4().hex
        told = f"{self.kind}/{self.tenant}/{self.about}/{self.until.timestamp()}"
        return sha256(told.encode()).hexdigest()[:32]


async def record_events(transaction: AsyncSession, events: Collection[TenantEvent], now: datetime) -> None:
    """Record the events for the webhooks that want them."""
    tenants = {event.tenant for event in events}
    if not tenants:
        return
    webhooks = (await transaction.execute(_held(Webhook.tenant_id.in_(tenants)))).all()
    if not webhooks:
        return
    waiting = await waiting_by_webhook(transaction, [webhook.id for webhook in webhooks])
    missed: Counter[int] = Counter()
    for event in events:
        event_id = event.id
        for webhook in webhooks:
            if webhook.tenant_id != event.tenant or not {event.kind.value, EVERY} & {*webhook.events}:
                continue
            if waiting[webhook.id] >= MOST_WAITING:
                missed[webhook.id] += 1
            elif await record_event(transaction, webhook.id, event_id, event, now):
                waiting[webhook.id] += 1
    for webhook_id, number in sorted(missed.items()):
        counted = update(Webhook).where(Webhook.id == webhook_id).values(missed=Webhook.missed + number)
        await transaction.execute(counted.execution_options(synchronize_session=False))


def _held(which: ColumnElement[bool]) -> Select[int, str, list[str]]:
    """Return a query for the webhooks that are on, in order of ids. Nobody deletes one of them before the transaction ends.

    An event for a deleted webhook would fail the whole transaction, and with it what it does for other tenants.
    """
    found = select(Webhook.id, Webhook.tenant_id, Webhook.events).where(which, Webhook.disabled_at.is_(None))
    # The lock that an event's insert takes: one at a time with a deletion, and beside deliveries and other tellers.
    return found.order_by(Webhook.id).with_for_update(read=True, key_share=True)


async def tell_failed_run(
    transaction: AsyncSession, tenant: TenantId, run: str, error: WeftError, now: datetime
) -> None:
    """Record that a model could not be made."""
    told = {"run_id": run, "error_code": error.code, "error_message": error.message}
    await record_events(transaction, [TenantEvent(tenant, EventKind.RUN_FAILED, run, told)], now)


async def record_event(
    transaction: AsyncSession, webhook_id: int, event_id: str, event: TenantEvent, now: datetime
) -> bool:
    """Record the event for one webhook. Return False, with nothing written, if the webhook has it."""
    body = event_document(
        id=event_id, kind=event.kind, tenant=event.tenant, subject=event.subject, at=now, data=event.data
    )
    values = {
        "webhook_id": webhook_id,
        "event_id": event_id,
        "type": event.kind.value,
        "body": body,
        "created_at": now,
        "due_at": now,
        "attempts": 0,
        "about": event.about,
        "about_until": event.until,
    }
    added = insert_unless_present(transaction, WebhookEvent).values(values).returning(WebhookEvent.id)
    return await transaction.scalar(added) is not None


async def waiting_by_webhook(session: AsyncSession, webhooks: Iterable[int]) -> Counter[int]:
    """Return how many events wait for each of the webhooks."""
    waits = (
        select(WebhookEvent.webhook_id, func.count().label("number"))
        .where(WebhookEvent.webhook_id.in_(list(webhooks)), WebhookEvent.due_at.is_not(None))
        .group_by(WebhookEvent.webhook_id)
    )
    return Counter({row.webhook_id: row.number for row in await session.execute(waits)})


async def tell_expiries(transaction: AsyncSession, now: datetime, *, after: int, most: int) -> tuple[int, int | None]:
    """Record events about checkpoints and keys that end soon, for the first webhook behind ``after`` that wants them.

    Return how many, and the webhook behind which to go on; None: no other is left.
    """
    webhook = (await transaction.execute(_held(Webhook.id > after).limit(1))).one_or_none()
    if webhook is None:
        return 0, None
    room = MOST_WAITING - (await waiting_by_webhook(transaction, [webhook.id]))[webhook.id]
    told = 0
    for event in await _expiries(transaction, webhook, now, most=most):
        if told >= room:
            break
        told += await record_event(transaction, webhook.id, event.id, event, now)
    # A webhook with as many new events as one look finds is looked at again.
    return told, webhook.id if told < most else after


async def _expiries(
    session: AsyncSession, webhook: Row[*tuple[Any, ...]], now: datetime, *, most: int
) -> list[TenantEvent]:
    """Return events that the webhook wants and has not, about what of its tenant ends soon."""
    kinds, tenant = {*webhook.events}, TenantId(webhook.tenant_id)
    found: list[TenantEvent] = []
    if kinds & {EventKind.CHECKPOINT_EXPIRING, EVERY}:
        checkpoints = await session.execute(
            select(Checkpoint.id, Checkpoint.run_id, Checkpoint.segment, Checkpoint.name, Checkpoint.expires_at)
            .where(
                Checkpoint.tenant_id == tenant,
                Checkpoint.listed,
                *_ends_soon(webhook.id, Checkpoint.id, Checkpoint.expires_at, now, CHECKPOINT_NOTICE),
            )
            .order_by(Checkpoint.expires_at)
            .limit(most)
        )
        for one in checkpoints:
            path = f"tinker://{one.run_id}/{one.segment}/{one.name}"
            data = {"path": path, "run_id": one.run_id, "expires_at": one.expires_at}
            found.append(TenantEvent(tenant, EventKind.CHECKPOINT_EXPIRING, path, data, one.id, one.expires_at))
    if kinds & {EventKind.KEY_EXPIRING, EVERY}:
        keys = await session.execute(
            select(ApiKey.id, ApiKey.prefix, ApiKey.note, ApiKey.expires_at)
            .where(
                ApiKey.tenant_id == tenant,
                ApiKey.revoked_at.is_(None),
                ApiKey.operator.is_(None),
                *_ends_soon(webhook.id, ApiKey.prefix, ApiKey.expires_at, now, KEY_NOTICE),
            )
            .limit(most)
        )
        for key in keys:
            data = {"key": key.prefix, "key_id": key.id, "note": key.note, "expires_at": key.expires_at}
            found.append(TenantEvent(tenant, EventKind.KEY_EXPIRING, key.prefix, data, key.prefix, key.expires_at))
    return found


def _ends_soon(
    webhook: int, name: Any, until: InstrumentedAttribute[Any], now: datetime, notice: timedelta
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that a row ends within ``notice``, and that the webhook has no event about this end."""
    told = select(WebhookEvent.id).where(
        WebhookEvent.webhook_id == webhook, WebhookEvent.about == name, WebhookEvent.about_until == until
    )
    yield until > now
    yield until <= now + notice
    yield ~told.exists()


async def forget_events(transaction: AsyncSession, *, before: datetime, most: int) -> int:
    """Delete at most ``most`` events recorded before ``before``, taken or not; return how many."""
    old = select(WebhookEvent.id).where(WebhookEvent.created_at < before).order_by(WebhookEvent.created_at).limit(most)
    gone = delete(WebhookEvent).where(WebhookEvent.id.in_(old)).returning(WebhookEvent.id)
    return len((await transaction.execute(gone.execution_options(synchronize_session=False))).all())
