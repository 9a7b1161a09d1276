"""Webhooks of tenants for operators, with asyncio. ``weft_client.admin_webhooks_sync`` is made of this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from weft_client.admin_calls import call, listed, once, path
from weft_client.bodies import webhook_state
from weft_client.modules import Later
from weft_client.transport_async import AsyncTransport

if TYPE_CHECKING:
    from weft_client import admin_models as m
else:
    m = Later("weft_client.admin_models")


class AsyncTenantsWebhooks:
    """Webhooks of tenants, each by its tenant's id and its name."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, tenant: str) -> AsyncIterator[m.WebhookBody]:
        """Yield the tenant's webhooks by their names."""
        async for one in self._transport.every(listed(path("tenants", tenant, "webhooks"), m.Page[m.WebhookBody])):
            yield one

    async def set(
        self,
        tenant: str,
        name: str,
        url: str | None = None,
        *,
        events: Collection[str] | None = None,
        note: str | None = None,
        is_enabled: bool | None = None,
    ) -> m.WebhookBody:
        """Make a webhook, or change what is given of it; ``events`` are kinds of events, or ``*`` for all.

        A new one needs a ``url``, and gets all events, no note, and is enabled.
        """
        body = webhook_state(url, events, note, is_enabled)
        return await self._transport.send(call("PUT", _path(tenant, name), m.WebhookBody, body=body))

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a webhook, with the events that wait for it."""
        await self._transport.send_only(call("DELETE", _path(tenant, name)))

    async def secret(self, tenant: str, name: str) -> m.WebhookSecretBody:
        """Return the secret with which the receiver checks signatures."""
        return await self._transport.send(call("GET", _path(tenant, name, "secret"), m.WebhookSecretBody))

    async def rotate(self, tenant: str, name: str, *, idempotency_key: str | None = None) -> m.WebhookSecretBody:
        """Give the webhook another secret; the one before signs beside it for a day."""
        below, headers = _path(tenant, name, "secret"), once(idempotency_key)
        return await self._transport.send(call("POST", below, m.WebhookSecretBody, headers=headers))

    async def test(self, tenant: str, name: str, *, idempotency_key: str | None = None) -> m.WebhookEventBody:
        """Send a test event."""
        below, headers = _path(tenant, name, "test"), once(idempotency_key)
        return await self._transport.send(call("POST", below, m.WebhookEventBody, headers=headers))

    async def events(self, tenant: str, name: str) -> AsyncIterator[m.WebhookEventBody]:
        """Yield the webhook's events, the newest first, page by page, with how their delivery went."""
        pages = listed(_path(tenant, name, "events"), m.Page[m.WebhookEventBody])
        async for one in self._transport.every(pages):
            yield one

    async def retry(self, tenant: str, name: str, event: str) -> m.WebhookEventBody:
        """Send an event once more, under the same id."""
        below = _path(tenant, name, "events", event, "retry")
        return await self._transport.send(call("POST", below, m.WebhookEventBody))


def _path(tenant: str, name: str, *below: str) -> str:
    return path("tenants", tenant, "webhooks", name, *below)
