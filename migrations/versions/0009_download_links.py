"""Links to checkpoints' files.

Revision: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "download_links",
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_download_links_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f("pk_download_links")),
    )
    op.create_index(op.f("ix_download_links_expires_at"), "download_links", ["expires_at"], unique=False)


def downgrade() -> None:
    """Revert."""
    op.drop_index(op.f("ix_download_links_expires_at"), table_name="download_links")
    op.drop_table("download_links")
