"""Progress of samples that a sampling process has left unfinished.

Revision: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "sample_progress",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("is_stale", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_sample_progress_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_sample_progress")),
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("sample_progress")
