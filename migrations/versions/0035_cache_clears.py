"""Clears of what replicas have cached behind a gate.

Revision: 0035
Revises: 0034
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("adapter_gates", sa.Column("cache_clears", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    """Revert."""
    op.drop_column("adapter_gates", "cache_clears")
