"""Webhooks of tenants, and the events that are sent to them.

Revision: 0052
Revises: 0051
"""

import sqlalchemy as sa
from alembic import op

revision = "0052"
down_revision = "0051"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("tenant_id", sa.String(32), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("name", sa.String(50), nullable=False),
        sa.Column("url", sa.String(2000), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
        sa.Column("secrets", sa.JSON(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("disabled_at", _TIME),
        sa.Column("disabled_reason", sa.String(200)),
        sa.Column("succeeded_at", _TIME),
        sa.Column("missed", sa.Integer(), nullable=False),
        sa.Column("rests_until", _TIME),
        sa.UniqueConstraint("tenant_id", "name"),
    )
    op.create_table(
        "webhook_events",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("webhook_id", sa.Integer(), sa.ForeignKey("webhooks.id"), nullable=False),
        sa.Column("event_id", sa.String(64), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("due_at", _TIME),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("delivered_at", _TIME),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.String(200)),
        sa.Column("about", sa.String(64)),
        sa.Column("about_until", _TIME),
    )
    op.create_index("ix_webhook_events_event", "webhook_events", ["webhook_id", "event_id"], unique=True)
    op.create_index("ix_webhook_events_created_at", "webhook_events", ["created_at"])
    for name, column in (("about", "about"), ("due", "due_at")):
        told = sa.text(f"{column} IS NOT NULL")
        op.create_index(
            f"ix_webhook_events_{name}",
            "webhook_events",
            ["webhook_id", column],
            sqlite_where=told,
            postgresql_where=told,
        )


def downgrade() -> None:
    """Revert."""
    op.drop_table("webhook_events")
    op.drop_table("webhooks")
