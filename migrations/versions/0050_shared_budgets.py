"""Budgets that a key shares with the one whose place it took.

Revision: 0050
Revises: 0049
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0050"
down_revision = "0049"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("api_keys", sa.Column("budget_key", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("api_keys", "budget_key")
