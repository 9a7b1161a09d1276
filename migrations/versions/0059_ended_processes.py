"""Processes that have died, and the replicas of sampling processes.

Revision: 0059
Revises: 0058
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0059"
down_revision = "0058"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("worker_processes", sa.Column("replicas", sa.JSON(), nullable=True))
    op.create_table(
        "ended_processes",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("host", sa.String(200), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("release", sa.String(64), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ended_processes"),
        if_not_exists=True,
    )
    op.create_index("ix_ended_processes_ended_at", "ended_processes", ["ended_at"], if_not_exists=True)


def downgrade() -> None:
    """Revert."""
    op.drop_table("ended_processes")
    op.drop_column("worker_processes", "replicas")
