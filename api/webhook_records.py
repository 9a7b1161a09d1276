"""Bodies of webhooks and their events, for tenants' administrators and for operators."""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession

from api.wire.request_model import PlainText, RequestModel
from contracts.webhooks import EventKind
from store.tables import Webhook, WebhookEvent
from tenants.webhooks import MOST_NOTE, WebhookSpec, last_errors

MOST_EVENTS = 100
"""Events of one page."""


class WebhookState(RequestModel):
    """State that a webhook is to have. ``events`` are kinds of events, or ``*`` for all.

    Null leaves a part as it is. A new webhook needs a ``url``, and gets all events, no note, and is enabled.
    """

    url: Annotated[PlainText, Field(max_length=2000)] | None = None
    events: Annotated[list[PlainText], Field(min_length=1, max_length=len(EventKind) + 1)] | None = None
    note: Annotated[PlainText, Field(max_length=MOST_NOTE)] | None = None
    is_enabled: bool | None = None

    def spec(self) -> WebhookSpec:
        """Return the state as ``tenants.webhooks`` takes it."""
        return WebhookSpec(self.url, self.events, self.note, self.is_enabled)


class WebhookBody(BaseModel):
    """A webhook.

    - ``disabled_at``, ``disabled_reason``: since when nothing is sent, and why if weft has switched it off itself.
    - ``succeeded_at``: last time at which the receiver took an event.
    - ``missed``: events that were not recorded, since too many waited.
    - ``last_error``: why the newest delivery failed; null if it did not.
    """

    name: str
    url: str
    events: list[str]
    note: str
    is_enabled: bool
    disabled_at: datetime | None
    disabled_reason: str | None
    created_at: datetime
    succeeded_at: datetime | None
    missed: int
    last_error: str | None = None


class WebhookSecretBody(BaseModel):
    """Secret that signs what is sent to a webhook."""

    name: str
    secret: str


class WebhookEventBody(BaseModel):
    """An event of a webhook. ``due_at``: when it is sent next; null: it was taken, or given up."""

    number: int
    id: str
    type: str
    created_at: datetime
    due_at: datetime | None
    attempts: int
    delivered_at: datetime | None
    last_status: int | None
    last_error: str | None
    body: dict[str, Any]


async def webhook_bodies(session: AsyncSession, rows: Sequence[Webhook]) -> list[WebhookBody]:
    """Return the bodies of rows of ``webhooks``."""
    errors = await last_errors(session, rows)
    return [_webhook_body(row, errors.get(row.id)) for row in rows]


def _webhook_body(row: Webhook, last_error: str | None) -> WebhookBody:
    return WebhookBody(
        name=row.name,
        url=row.url,
        events=row.events,
        note=row.note,
        is_enabled=row.disabled_at is None,
        disabled_at=row.disabled_at,
        disabled_reason=row.disabled_reason,
        created_at=row.created_at,
        succeeded_at=row.succeeded_at,
        missed=row.missed,
        last_error=last_error,
    )


def webhook_event_body(row: WebhookEvent) -> WebhookEventBody:
    """Return the body of a row of ``webhook_events``."""
    return WebhookEventBody(
        number=row.id,
        id=row.event_id,
        type=row.type,
        created_at=row.created_at,
        due_at=row.due_at,
        attempts=row.attempts,
        delivered_at=row.delivered_at,
        last_status=row.last_status,
        last_error=row.last_error,
        body=json.loads(row.body),
    )
