"""Webhooks of a tenant, with asyncio. ``weft_client.webhooks_sync`` is made of this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from weft_client import calls
from weft_client.transport_async import AsyncTransport

if TYPE_CHECKING:
    from weft_client import models


class AsyncWebhooks:
    """Webhooks: addresses of the tenant's to which weft sends what happens."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> models.WebhookList:
        """List the webhooks."""
        return await self._transport.send(calls.webhooks())

    async def set(
        self,
        name: str,
        url: str | None = None,
        *,
        events: Collection[str] | None = None,
        note: str | None = None,
        is_enabled: bool | None = None,
    ) -> models.WebhookBody:
        """Make a webhook, or change what is given of it; ``events`` are kinds of events, or ``*`` for all.

        A new one needs a ``url``, and gets all events, no note, and is enabled.
        """
        asked = calls.set_webhook(name, url=url, events=events, note=note, is_enabled=is_enabled)
        return await self._transport.send(asked)

    async def delete(self, name: str) -> None:
        """Delete a webhook, with the events that wait for it."""
        await self._transport.send_only(calls.delete_webhook(name))

    async def secret(self, name: str) -> models.WebhookSecretBody:
        """Return the secret with which the receiver checks signatures."""
        return await self._transport.send(calls.webhook_secret(name))

    async def rotate(self, name: str, *, idempotency_key: str | None = None) -> models.WebhookSecretBody:
        """Give the webhook another secret; the one before signs beside it for a day."""
        return await self._transport.send(calls.rotate_webhook_secret(name, idempotency_key=idempotency_key))

    async def test(self, name: str, *, idempotency_key: str | None = None) -> models.WebhookEventBody:
        """Send a test event."""
        return await self._transport.send(calls.test_webhook(name, idempotency_key=idempotency_key))

    async def events(self, name: str) -> AsyncIterator[models.WebhookEventBody]:
        """Yield the webhook's events, the newest first, page by page, with how their delivery went."""
        before: int | None = None
        while True:
            page = await self._transport.send(calls.webhook_events(name, before=before))
            for event in page.events:
                yield event
            if (before := page.next_before) is None:
                return

    async def retry(self, name: str, event: str) -> models.WebhookEventBody:
        """Send an event once more, under the same id."""
        return await self._transport.send(calls.retry_webhook_event(name, event))
