"""Swap policies of live samplers, and the sessions that jobs on weights belong to.

Revision: 0051
Revises: 0050
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, add_reference, build_index, drop_index

revision = "0051"
down_revision = "0050"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("samplers", sa.Column("swap_policy", sa.String(8), nullable=True))
    add_reference("weight_jobs", "session_id", "sessions")
    build_index("ix_weight_jobs_session_id", "weight_jobs", ["session_id"])


def downgrade() -> None:
    """Revert."""
    drop_index("ix_weight_jobs_session_id", "weight_jobs")
    op.drop_column("weight_jobs", "session_id")
    op.drop_column("samplers", "swap_policy")
