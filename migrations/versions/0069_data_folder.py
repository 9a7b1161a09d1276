"""The data folder that a database's rows name files of.

Revision: 0069
Revises: 0068
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0069"
down_revision = "0068"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. The first process of this version that starts notes the folder."""
    add_column("service_presence", sa.Column("data_folder", sa.String(32)))


def downgrade() -> None:
    """Revert."""
    op.drop_column("service_presence", "data_folder")
