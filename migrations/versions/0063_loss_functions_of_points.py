"""Loss functions of a point's passes.

Revision: 0063
Revises: 0062
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0063"
down_revision = "0062"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. Points that are there tell none."""
    add_column("run_points", sa.Column("loss_fns", sa.String(128), nullable=False, server_default=""))


def downgrade() -> None:
    """Revert."""
    op.drop_column("run_points", "loss_fns")
