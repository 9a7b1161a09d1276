"""The last heartbeat of a session.

Revision: 0064
Revises: 0063
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0064"
down_revision = "0063"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. Sessions that are there tell theirs with the next one, 10 s later."""
    add_column("sessions", sa.Column("heartbeat_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Revert."""
    op.drop_column("sessions", "heartbeat_at")
