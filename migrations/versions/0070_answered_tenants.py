"""The time since which a tenant's clients are answered again after a block.

Revision: 0070
Revises: 0069
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0070"
down_revision = "0069"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. A tenant that is blocked now gets the time when its block ends."""
    add_column("tenants", sa.Column("answered_since", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Revert."""
    op.drop_column("tenants", "answered_since")
