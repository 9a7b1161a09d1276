"""Addresses of checkpoints that tenants have deleted.

Revision: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table. A checkpoint that was deleted before has no row: a repeat of its deletion gets 404."""
    op.create_table(
        "deleted_checkpoints",
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("segment", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_deleted_checkpoints_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "segment", "name", name=op.f("pk_deleted_checkpoints")),
    )
    op.create_index(op.f("ix_deleted_checkpoints_deleted_at"), "deleted_checkpoints", ["deleted_at"], unique=False)


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("deleted_checkpoints")
