"""The code of a version command's error.

Revision: 0065
Revises: 0064
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0065"
down_revision = "0064"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. A process of a version before tells no code: its failures are final, as they were."""
    add_column("version_orders", sa.Column("error_code", sa.String(64)))


def downgrade() -> None:
    """Revert."""
    op.drop_column("version_orders", "error_code")
