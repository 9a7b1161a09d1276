"""Copies of each sampler's client.

Revision: 0024
Revises: 0023
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("samplers", sa.Column("copies", sa.BigInteger(), server_default="0", nullable=False))


def downgrade() -> None:
    """Revert."""
    op.drop_column("samplers", "copies")
