"""Delivery of events to webhooks: at least once, under an id that never changes, from one process at a time for each."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic

from sqlalchemy import ColumnElement, Update, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from contracts.ids import TenantId
from contracts.webhooks import signed_headers
from ledger.runtime import Runtime
from store.batcher import few_lengths
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
"""Time after which a webhook's place is the next one's."""
_ROUND_SECONDS = 60.0
"""Time after which no further webhook is sent to, so that the step is recorded."""
_LOOK_SECONDS = 1.0
"""Time between two looks for what has come due, while receivers are slow."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A webhook with due events."""

    id: int
    tenant: TenantId


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
        """Send due events, to the next webhook as soon as another's are sent, so that none waits for a slow receiver.

        Return how many events were sent, and whether more may be due, which is so when the time of a round is over. Nothing is
        sent where the settings say so.
        """
        if not self._runtime.settings.send_webhooks:
            return 0, False
        ends = monotonic() + _ROUND_SECONDS
        sending: dict[asyncio.Task[int], _Due] = {}
        sent, failures = 0, list[BaseException]()
        try:
            while True:
                if not failures and monotonic() < ends:
                    for due in await self._choose(sending.values()):
                        sending[asyncio.create_task(self._send_to(due.id, ends))] = due
                if not sending:
                    break
                ended, _ = await asyncio.wait(sending, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    del sending[task]
                    if (failure := task.exception()) is not None:
                        failures.append(failure)
                    else:
                        sent += task.result()
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        if failures:
            # Raised once all have ended: one webhook's failure takes no other's outcome along.
            raise failures[0]
        return sent, monotonic() >= ends

    async def _choose(self, sending: Collection[_Due]) -> list[_Due]:
        """Return further webhooks for the places that are free: few of a tenant, and first whoever was served longest ago.

        So a free place is no longer that of who just had it, as long as another waits, however long its own events are due.
        """
        now = self._runtime.clock()
        of_tenants = Counter(one.tenant for one in sending)
        full = [tenant for tenant, number in of_tenants.items() if number >= _MOST_OF_TENANT]
        due = (
            select(
                Webhook.id,
                Webhook.tenant_id,
                _served(Webhook).label("served"),
                func.min(WebhookEvent.due_at).label("first"),
            )
            .join(WebhookEvent, WebhookEvent.webhook_id == Webhook.id)
            .where(WebhookEvent.due_at <= now, *_is_free(now))
            .where(
                Webhook.id.not_in(few_lengths([one.id for one in sending])), Webhook.tenant_id.not_in(few_lengths(full))
            )
            .group_by(Webhook.id, Webhook.tenant_id, Webhook.rests_until, Webhook.created_at)
            .subquery()
        )
        order = (due.c.served, due.c.first, due.c.id)
        turn = func.row_number().over(partition_by=due.c.tenant_id, order_by=order).label("turn")
        turns = select(due, turn).subquery()
        # By all of a tenant's webhooks: one of them that is sent to puts the others behind those of other tenants.
        beside = aliased(Webhook)
        served = select(func.max(_served(beside))).where(beside.tenant_id == turns.c.tenant_id).scalar_subquery()
        # As many rows as there are places: no more are passed over than webhooks that are sent to have places.
        heads = (
            select(turns.c.id, turns.c.tenant_id)
            .where(turns.c.turn <= _MOST_OF_TENANT)
            .order_by(turns.c.turn, served, turns.c.first, turns.c.id)
            .limit(_MOST_WEBHOOKS)
        )
        async with self._runtime.database.read() as session:
            rows = (await session.execute(heads)).all()
        chosen: list[_Due] = []
        for row in rows:
            if len(sending) + len(chosen) < _MOST_WEBHOOKS and of_tenants[row.tenant_id] < _MOST_OF_TENANT:
                of_tenants[row.tenant_id] += 1
                chosen.append(_Due(row.id, TenantId(row.tenant_id)))
        return chosen

    async def _send_to(self, webhook: int, ends: float) -> int:
        """Send some of the webhook's due events in order, until one fails or the round ends. Return how many were taken."""
        claimed = await self._claim(webhook)
        if claimed is None:
            return 0
        ends, taken = min(ends, monotonic() + _BATCH_SECONDS), 0
        events = await self._due_events(webhook)
        async with self._sender.client() as client:
            for event in events:
                headers = signed_headers(event.event_id, event.body, claimed.secrets, self._runtime.clock())
                outcome = await self._sender.send(client, claimed.tenant, claimed.url, headers, event.body)
                async with self._runtime.database.write() as transaction:
                    await self._note(transaction, claimed, event, outcome)
                if not outcome.is_taken:
                    return taken
                taken += 1
                if monotonic() > ends:
                    break
        await self._release(claimed)
        return taken

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
        of_webhook = update(Webhook).where(Webhook.id == claimed.id)
        if outcome.is_taken:
            of_webhook = of_webhook.values(succeeded_at=now)
        else:
            of_webhook = of_webhook.where(Webhook.rests_until == claimed.until).values(rests_until=now + _REST)
        # Before the event: whoever deletes a webhook locks it before its events, too.
        await _change(transaction, of_webhook)
        # Asked to be sent once more meanwhile, it stays due.
        this = (WebhookEvent.id == event.id, WebhookEvent.due_at == event.due_at)
        await _change(transaction, update(WebhookEvent).where(*this).values(values))
        if outcome.is_taken:
            return
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
        """Let the webhook be sent to again, and note that it was served just now."""
        mine = update(Webhook).where(Webhook.id == claimed.id, Webhook.rests_until == claimed.until)
        async with self._runtime.database.write() as transaction:
            await _change(transaction, mine.values(rests_until=self._runtime.clock()))


async def _change(transaction: AsyncSession, statement: Update) -> None:
    await transaction.execute(statement.execution_options(synchronize_session=False))


def _served(webhook: type[Webhook]) -> ColumnElement[datetime]:
    """Return the time of the last delivery, which is still to come for a webhook that is sent to; its making before the first.

    A webhook that is new is no sooner served than one that waits: else it could be made anew for each event.
    """
    return func.coalesce(webhook.rests_until, webhook.created_at)


def _is_free(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return (Webhook.disabled_at.is_(None), or_(Webhook.rests_until.is_(None), Webhook.rests_until <= now))
