"""Optimizer of each run.

Revision: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    # Runs that are there, and those that an old process still opens, have AdamW.
    add_column("runs", sa.Column("optimizer", sa.String(length=16), server_default="adamw", nullable=False))


def downgrade() -> None:
    """Revert."""
    op.drop_column("runs", "optimizer")
