"""Records of samples that training may name.

Revision: 0028
Revises: 0027
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "sample_records",
        sa.Column("operation_id", sa.String(36), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_sample_records_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("operation_id", name="pk_sample_records"),
    )
    op.create_index("ix_sample_records_expires_at", "sample_records", ["expires_at"])
    op.create_index("ix_sample_records_session_id", "sample_records", ["session_id"])


def downgrade() -> None:
    """Revert."""
    op.drop_table("sample_records")
