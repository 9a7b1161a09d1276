"""Webhooks of a tenant, without asyncio.

``clients/python/make_sync.py`` makes this file of ``weft_client.webhooks_async``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from weft_client import calls
from weft_client.transport_sync import Transport

if TYPE_CHECKING:
    from weft_client import models


class Webhooks:
    """Webhooks: addresses of the tenant's to which weft sends what happens."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> models.WebhookList:
        """List the webhooks."""
        return self._transport.send(calls.webhooks())

    def set(
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
        return self._transport.send(asked)

    def delete(self, name: str) -> None:
        """Delete a webhook, with the events that wait for it."""
        self._transport.send_only(calls.delete_webhook(name))

    def secret(self, name: str) -> models.WebhookSecretBody:
        """Return the secret with which the receiver checks signatures."""
        return self._transport.send(calls.webhook_secret(name))

    def rotate(self, name: str, *, idempotency_key: str | None = None) -> models.WebhookSecretBody:
        """Give the webhook another secret; the one before signs beside it for a day."""
        return self._transport.send(calls.rotate_webhook_secret(name, idempotency_key=idempotency_key))

    def test(self, name: str, *, idempotency_key: str | None = None) -> models.WebhookEventBody:
        """Send a test event."""
        return self._transport.send(calls.test_webhook(name, idempotency_key=idempotency_key))

    def events(self, name: str) -> Iterator[models.WebhookEventBody]:
        """Yield the webhook's events, the newest first, page by page, with how their delivery went."""
        before: int | None = None
        while True:
            page = self._transport.send(calls.webhook_events(name, before=before))
            for event in page.events:
                yield event
            if (before := page.next_before) is None:
                return

    def retry(self, name: str, event: str) -> models.WebhookEventBody:
        """Send an event once more, under the same id."""
        return self._transport.send(calls.retry_webhook_event(name, event))
