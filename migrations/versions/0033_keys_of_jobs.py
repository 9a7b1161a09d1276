"""Keys by which tenants name their requests for jobs on weights.

Revision: 0033
Revises: 0032
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("weight_jobs", sa.Column("idempotency_key", sa.String(200), nullable=True))
    op.create_index(
        "ix_weight_jobs_idempotency_key",
        "weight_jobs",
        ["tenant_id", "idempotency_key"],
        unique=True,
        if_not_exists=True,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_index("ix_weight_jobs_idempotency_key", table_name="weight_jobs")
    with op.batch_alter_table("weight_jobs") as columns:
        columns.drop_column("idempotency_key")
