"""Trace id of an operation.

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("operations", sa.Column("trace_id", sa.String(length=32), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("operations", "trace_id")
