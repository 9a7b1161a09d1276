"""Processes that end in order, and the drain of those that were taken for dead.

Revision: 0066
Revises: 0065
"""

import sqlalchemy as sa
from alembic import op

revision = "0066"
down_revision = "0065"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. A process of a version before does not tell that it ends, and keeps no drain of one that it reaps."""
    op.add_column("worker_processes", sa.Column("ending_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("ended_processes", sa.Column("drained_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("ended_processes", sa.Column("drain_reason", sa.String(500), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("ended_processes", "drain_reason")
    op.drop_column("ended_processes", "drained_at")
    op.drop_column("worker_processes", "ending_at")
