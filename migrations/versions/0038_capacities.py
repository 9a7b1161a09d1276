"""Capacities of worker processes.

Revision: 0038
Revises: 0037
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("worker_processes", sa.Column("capacity", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("worker_processes", "capacity")
