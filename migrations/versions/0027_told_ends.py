"""Numbers under which clients were told of samples' ends.

Revision: 0027
Revises: 0024
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0027"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("operations", sa.Column("told_as", sa.BigInteger(), nullable=True))
    ended = "kind = 'sample' AND finished_at IS NOT NULL"
    build_index("ix_operations_ended_samples", "operations", ["lane", "told_as"], where=ended)


def downgrade() -> None:
    """Revert."""
    drop_index("ix_operations_ended_samples", "operations")
    op.drop_column("operations", "told_as")
