"""Suspensions that restored tenants have again.

Revision: 0042
Revises: 0041
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("tenants", sa.Column("prior_mode", sa.String(16), nullable=True))
    add_column("tenants", sa.Column("prior_reason", sa.String(500), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("tenants", "prior_reason")
    op.drop_column("tenants", "prior_mode")
