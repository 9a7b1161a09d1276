"""The number of a sample's claims, by which its followers tell late tokens of a process that has lost it.

Revision: 0067
Revises: 0066
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0067"
down_revision = "0066"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. A process of a version before counts no claims and tells none: its tokens are taken as they were."""
    add_column("operations", sa.Column("claims", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Revert."""
    op.drop_column("operations", "claims")
