"""Weights of runs among the runs of their tenants.

Revision: 0054
Revises: 0053
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0054"
down_revision = "0053"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("runs", sa.Column("weight", sa.Float(), nullable=False, server_default="1"))


def downgrade() -> None:
    """Revert."""
    op.drop_column("runs", "weight")
