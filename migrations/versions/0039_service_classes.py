"""Classes of tenants.

Revision: 0039
Revises: 0038
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("tenants", sa.Column("service_class", sa.String(16), server_default="standard", nullable=False))


def downgrade() -> None:
    """Revert."""
    op.drop_column("tenants", "service_class")
