"""Weights of base models, by fingerprint.

Revision: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "base_weights",
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("base_model", name=op.f("pk_base_weights")),
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("base_weights")
