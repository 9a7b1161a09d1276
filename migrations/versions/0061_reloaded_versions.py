"""Version that a run's live samplers were last pointed at by a reload, for samplers that come later.

Revision: 0061
Revises: 0060
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0061"
down_revision = "0060"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("runs", sa.Column("reloaded_version", sa.String(32), nullable=True))
    add_column("runs", sa.Column("reloaded_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("runs", "reloaded_at")
    op.drop_column("runs", "reloaded_version")
