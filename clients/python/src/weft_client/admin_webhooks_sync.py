"""Webhooks of tenants for operators, without asyncio.

``clients/python/make_sync.py`` makes this file of ``weft_client.admin_webhooks_async``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from weft_client.admin_calls import call, listed, once, path
from weft_client.bodies import webhook_state
from weft_client.modules import Later
from weft_client.transport_sync import Transport

if TYPE_CHECKING:
    from weft_client import admin_models as m
else:
    m = Later("weft_client.admin_models")


class TenantsWebhooks:
    """Webhooks of tenants, each by its tenant's id and its name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, tenant: str) -> Iterator[m.WebhookBody]:
        """Yield the tenant's webhooks by their names."""
        for one in self._transport.every(listed(path("tenants", tenant, "webhooks"), m.Page[m.WebhookBody])):
            yield one

    def set(
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
        return self._transport.send(call("PUT", _path(tenant, name), m.WebhookBody, body=body))

    def delete(self, tenant: str, name: str) -> None:
        """Delete a webhook, with the events that wait for it."""
        self._transport.send_only(call("DELETE", _path(tenant, name)))

    def secret(self, tenant: str, name: str) -> m.WebhookSecretBody:
        """Return the secret with which the receiver checks signatures."""
        return self._transport.send(call("GET", _path(tenant, name, "secret"), m.WebhookSecretBody))

    def rotate(self, tenant: str, name: str, *, idempotency_key: str | None = None) -> m.WebhookSecretBody:
        """Give the webhook another secret; the one before signs beside it for a day."""
        below, headers = _path(tenant, name, "secret"), once(idempotency_key)
        return self._transport.send(call("POST", below, m.WebhookSecretBody, headers=headers))

    def test(self, tenant: str, name: str, *, idempotency_key: str | None = None) -> m.WebhookEventBody:
        """Send a test event."""
        below, headers = _path(tenant, name, "test"), once(idempotency_key)
        return self._transport.send(call("POST", below, m.WebhookEventBody, headers=headers))

    def events(self, tenant: str, name: str) -> Iterator[m.WebhookEventBody]:
        """Yield the webhook's events, the newest first, page by page, with how their delivery went."""
        pages = listed(_path(tenant, name, "events"), m.Page[m.WebhookEventBody])
        for one in self._transport.every(pages):
            yield one

    def retry(self, tenant: str, name: str, event: str) -> m.WebhookEventBody:
        """Send an event once more, under the same id."""
        below = _path(tenant, name, "events", event, "retry")
        return self._transport.send(call("POST", below, m.WebhookEventBody))


def _path(tenant: str, name: str, *below: str) -> str:
    return path("tenants", tenant, "webhooks", name, *below)
