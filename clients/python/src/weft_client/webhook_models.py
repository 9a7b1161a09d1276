"""Records of webhooks and their events. ``weft_client.models`` has them too."""

from datetime import datetime
from typing import Any

from weft_client.sampling_models import Record


class WebhookBody(Record):
    """A webhook; ``missed``: events that were not recorded, since too many waited."""

    name: str
    url: str
    events: list[str]
    note: str
    is_enabled: bool
    disabled_at: datetime | None = None
    disabled_reason: str | None = None
    created_at: datetime
    succeeded_at: datetime | None = None
    last_error: str | None = None
    missed: int


class WebhookList(Record):
    """Webhooks by their names."""

    webhooks: list[WebhookBody]


class WebhookSecretBody(Record):
    """Secret that signs what is sent to a webhook."""

    name: str
    secret: str


class WebhookEventBody(Record):
    """An event of a webhook; ``due_at``: when it is sent next, None if it was taken or given up."""

    number: int
    id: str
    type: str
    created_at: datetime
    due_at: datetime | None = None
    attempts: int
    delivered_at: datetime | None = None
    last_status: int | None = None
    last_error: str | None = None
    body: dict[str, Any]


class WebhookEventList(Record):
    """A page of events, the newest first."""

    events: list[WebhookEventBody]
    next_before: int | None = None
