"""Table of operators' directives for single replicas.

Revision: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "ordered_replicas",
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("replica", sa.String(length=200), nullable=False),
        sa.Column("wanted", sa.String(length=8), nullable=False),
        sa.Column("reason", sa.String(length=500), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("base_model", "replica", name=op.f("pk_ordered_replicas")),
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("ordered_replicas")
