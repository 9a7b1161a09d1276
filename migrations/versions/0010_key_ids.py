"""API keys of operations and of download links, so that a key's revocation ends both.

Revision: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    for table in ("operations", "download_links"):
        op.add_column(table, sa.Column("key_id", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Revert."""
    for table in ("operations", "download_links"):
        with op.batch_alter_table(table) as columns:
            columns.drop_column("key_id")
