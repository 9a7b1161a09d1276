"""Usage of tenants by day.

Revision: 0008
Revises: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("operations", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_days_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("tenant_id", "day", "base_model", "kind", name=op.f("pk_usage_days")),
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("usage_days")
