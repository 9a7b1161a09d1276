"""Delivery of events to webhooks: at least once, under an id that never changes, from one process at a time for each."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

from sqlalchemy import ColumnElement, Update, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from contracts.webhooks import signed_headers
from ledger.runtime import Runtime
from store.tables import Webhook, WebhookEvent
from tenants.audit import HOUSEKEEPING, record
from tenants.audit_actions import Action
from tenants.webhooks import signing_secrets
from workers.webhooks.sender import GONE, Outcome, WebhookSender

BACKOFF = tuple(timedelta(seconds=seconds) for seconds in (5, 60, 300, 1800, 2 * 3600, 5 * 3600, 10 * 3600, 10 * 3600))
"""Times after the first failures of an event. It is given up at the one after the last, a day and a half later."""
_JITTER = 0.2
_LEASE = timedelta(seconds=60)
"""Time after which another process sends for a webhook whose process has died."""
_REST = timedelta(seconds=5)
"""Time for which nothing is sent to a webhook that has failed."""
_MOST_WEBHOOKS, _MOST_OF_TENANT = 32, 2
"""Webhooks that are sent to at once, and those of one tenant among them."""
_MOST_EVENTS = 20
_BATCH_SECONDS = 15.0
_LOOKED_AT = 500


@dataclass(frozen=True, slots=True)
class _Claimed:
    """A webhook that this process sends to until ``until``."""

    id: int
    tenant: TenantId
    url: str
    secrets: Sequence[str]
    until: datetime


class WebhookDelivery:
    """Sends what is due. Several processes may: each webhook has a lease."""

    def __init__(self, runtime: Runtime) -> None:
        """See ``WebhookSender`` for the addresses that are reached."""
        self._runtime = runtime
        self._sender = WebhookSender(runtime.settings.webhook_networks)

    async def deliver(self) -> tuple[int, bool]:
        """Send to some of the webhooks with due events. Return how many events were sent, and whether more may be due."""
        chosen, is_all = await self._choose()
        ends = await asyncio.gather(*(self._send_to(webhook) for webhook in chosen), return_exceptions=True)
        # Raised once all have ended: one webhook's failure takes no other's outcome along.
        sent = [_sent(end) for end in ends]
        return sum(number for number, _ in sent), not is_all or any(is_more for _, is_more in sent)

    async def _choose(self) -> tuple[list[int], bool]:
        """Return webhooks with due events, the longest due first and few of each tenant, and whether those are all."""
        now = self._runtime.clock()
        due = (
            select(Webhook.id, Webhook.tenant_id, func.min(WebhookEvent.due_at).label("first"))
            .join(WebhookEvent, WebhookEvent.webhook_id == Webhook.id)
            .where(WebhookEvent.due_at <= now, *_is_free(now))
            .group_by(Webhook.id, Webhook.tenant_id)
            .order_by("first", Webhook.id)
            .limit(_LOOKED_AT)
        )
        async with self._runtime.database.read() as session:
            rows = (await session.execute(due)).all()
        of_tenants: Counter[str] = Counter()
        chosen: list[int] = []
        for row in rows:
            if len(chosen) < _MOST_WEBHOOKS and of_tenants[row.tenant_id] < _MOST_OF_TENANT:
                of_tenants[row.tenant_id] += 1
                chosen.append(row.id)
        return chosen, len(chosen) == len(rows)

    async def _send_to(self, webhook: int) -> tuple[int, bool]:
        """Send the webhook's due events in order, until one fails. Return how many were taken, and whether more are due."""
        claimed = await self._claim(webhook)
        if claimed is None:
            return 0, False
        began, taken = monotonic(), 0
        events = await self._due_events(webhook)
        async with self._sender.client() as client:
            for event in events:
                headers = signed_headers(event.event_id, event.body, claimed.secrets, self._runtime.clock())
                outcome = await self._sender.send(client, claimed.tenant, claimed.url, headers, event.body)
                async with self._runtime.database.write() as transaction:
                    await self._note(transaction, claimed, event, outcome)
                if not outcome.is_taken:
                    return taken, False
                taken += 1
                if monotonic() - began > _BATCH_SECONDS:
                    break
        await self._release(claimed)
        return taken, taken < len(events) or len(events) == _MOST_EVENTS

    async def _claim(self, webhook: int) -> _Claimed | None:
        """Take the webhook's lease; return None if another process has it, or it is gone."""
        now = self._runtime.clock()
        until = now + _LEASE
        claim = (
            update(Webhook)
            .where(Webhook.id == webhook, *_is_free(now))
            .values(rests_until=until)
            .returning(Webhook)
            .execution_options(synchronize_session=False)
        )
        async with self._runtime.database.write() as transaction:
            found = await transaction.scalar(claim)
            if found is None:
                return None
            return _Claimed(found.id, TenantId(found.tenant_id), found.url, signing_secrets(found, now), until)

    async def _due_events(self, webhook: int) -> Sequence[WebhookEvent]:
        due = select(WebhookEvent).where(
            WebhookEvent.webhook_id == webhook, WebhookEvent.due_at <= self._runtime.clock()
        )
        async with self._runtime.database.read() as session:
            return (await session.scalars(due.order_by(WebhookEvent.id).limit(_MOST_EVENTS))).all()

    async def _note(self, transaction: AsyncSession, claimed: _Claimed, event: WebhookEvent, outcome: Outcome) -> None:
        """Record the outcome of a delivery. After a failure the webhook rests."""
        now = self._runtime.clock()
        attempts = event.attempts + 1
        is_last = attempts > len(BACKOFF)
        values: dict[str, object] = {
            "attempts": attempts,
            "last_status": outcome.status,
            "last_error": outcome.told,
            "due_at": None,
        }
        if outcome.is_taken:
            values["delivered_at"] = now
        elif not is_last:
            values["due_at"] = now + BACKOFF[attempts - 1] * (1 + random.uniform(0, _JITTER))
        # Asked to be sent once more meanwhile, it stays due.
        this = (WebhookEvent.id == event.id, WebhookEvent.due_at == event.due_at)
        await _change(transaction, update(WebhookEvent).where(*this).values(values))
        of_webhook = update(Webhook).where(Webhook.id == claimed.id)
        if outcome.is_taken:
            await _change(transaction, of_webhook.values(succeeded_at=now))
            return
        await _change(
            transaction, of_webhook.where(Webhook.rests_until == claimed.until).values(rests_until=now + _REST)
        )
        if outcome.status == GONE:
            await self._disable(transaction, claimed, "the receiver answered 410, which says that it is gone")
        elif is_last:
            in_vain = or_(Webhook.succeeded_at.is_(None), Webhook.succeeded_at < event.created_at)
            await self._disable(transaction, claimed, "the receiver took no event for more than a day", in_vain)

    async def _disable(
        self, transaction: AsyncSession, claimed: _Claimed, reason: str, *conditions: ColumnElement[bool]
    ) -> None:
        """Send nothing to the webhook any more, until its tenant switches it on again."""
        now = self._runtime.clock()
        disabled = (
            update(Webhook)
            .where(Webhook.id == claimed.id, Webhook.url == claimed.url, Webhook.disabled_at.is_(None), *conditions)
            .values(disabled_at=now, disabled_reason=reason)
            .returning(Webhook.tenant_id, Webhook.name)
        )
        row = (await transaction.execute(disabled.execution_options(synchronize_session=False))).one_or_none()
        if row is not None:
            told = {"is_enabled": False, "reason": reason}
            tenant = TenantId(row.tenant_id)
            await record(transaction, HOUSEKEEPING, Action.WEBHOOK_SET, row.name, tenant=tenant, now=now, after=told)

    async def _release(self, claimed: _Claimed) -> None:
        mine = update(Webhook).where(Webhook.id == claimed.id, Webhook.rests_until == claimed.until)
        async with self._runtime.database.write() as transaction:
            await _change(transaction, mine.values(rests_until=None))


def _sent(end: tuple[int, bool] | BaseException) -> tuple[int, bool]:
    if isinstance(end, BaseException):
        raise end
    return end


async def _change(transaction: AsyncSession, statement: Update) -> None:
    await transaction.execute(statement.execution_options(synchronize_session=False))


def _is_free(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (Webhook.disabled_at.is_(None), or_(Webhook.rests_until.is_(None), Webhook.rests_until <= now))
