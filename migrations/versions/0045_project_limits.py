"""Limits of projects.

Revision: 0045
Revises: 0044
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0045"
down_revision = "0044"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("projects", sa.Column("limits", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("projects", "limits")
