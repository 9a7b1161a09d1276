"""Tables of tenants' webhooks, and of the events that are sent to them."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from store.tables.base import Base, partial_index


class Webhook(Base):
    """An address of a tenant's to which events are sent.

    - ``secrets``: secrets that sign, the newest first, each as ``{"secret": …, "until": ISO time or null}``; ``made_by``, where
      it is, names the request that a repeat of is answered with the same secret.
    - ``disabled_at``, ``disabled_reason``: since when and why nothing is sent; None: it is sent.
    - ``succeeded_at``: last time at which the receiver took an event.
    - ``missed``: events that were not recorded, since too many waited.
    - ``rests_until``: lease of the process that sends, the end of the rest after a failure, or the time at which the webhook was
      last served or switched on; None: never yet.
    """

    __tablename__ = "webhooks"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(50))
    url: Mapped[str] = mapped_column(String(2000))
    events: Mapped[list[str]]
    note: Mapped[str] = mapped_column(String(200))
    secrets: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    created_at: Mapped[datetime]
    disabled_at: Mapped[datetime | None]
    disabled_reason: Mapped[str | None] = mapped_column(String(200))
    succeeded_at: Mapped[datetime | None]
    missed: Mapped[int]
    rests_until: Mapped[datetime | None]

    __table_args__ = (UniqueConstraint("tenant_id", "name"),)


class WebhookEvent(Base):
    """An event for one webhook, written in the transaction of what it tells.

    - ``event_id``: name of the event, by which a receiver knows a repeated delivery. ``body``: exactly what is sent.
    - ``due_at``: next time at which it is sent; None: it was taken, or given up.
    - ``last_error``: why the last attempt failed.
    - ``about``, ``about_until``: thing that ends, and when, by which one notice of an end is told from another.
    """

    __tablename__ = "webhook_events"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    webhook_id: Mapped[int] = mapped_column(ForeignKey("webhooks.id"))
    event_id: Mapped[str] = mapped_column(String(64))
    type: Mapped[str] = mapped_column(String(64))
    body: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]
    due_at: Mapped[datetime | None]
    attempts: Mapped[int]
    delivered_at: Mapped[datetime | None]
    last_status: Mapped[int | None]
    last_error: Mapped[str | None] = mapped_column(String(200))
    about: Mapped[str | None] = mapped_column(String(64))
    about_until: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_webhook_events_event", "webhook_id", "event_id", unique=True),
        Index("ix_webhook_events_created_at", "created_at"),
        partial_index("ix_webhook_events_about", "webhook_id", "about", where=text("about IS NOT NULL")),
        partial_index("ix_webhook_events_due", "webhook_id", "due_at", where=text("due_at IS NOT NULL")),
    )
