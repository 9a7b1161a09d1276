"""Attempts of operations.

Revision: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. Adding a column with a constant default rewrites no table."""
    add_column("operations", sa.Column("attempts", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    """Revert."""
    # No batch mode: it would make the whole table anew.
    op.drop_column("operations", "attempts")
