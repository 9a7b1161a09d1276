"""Checkpoints that operations hold, and folders of deleted ones.

Revision: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables. A ``load_weights`` of before has no row: its name is resolved when it runs or is replayed."""
    op.create_table(
        "checkpoint_holds",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_checkpoint_holds_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_checkpoint_holds")),
    )
    op.create_index(op.f("ix_checkpoint_holds_checkpoint_id"), "checkpoint_holds", ["checkpoint_id"], unique=False)
    op.create_table(
        "discarded_folders",
        sa.Column("directory", sa.String(length=500), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=32), nullable=False),
        sa.Column("discarded_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_discarded_folders_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("directory", name=op.f("pk_discarded_folders")),
    )
    op.create_index(op.f("ix_discarded_folders_discarded_at"), "discarded_folders", ["discarded_at"], unique=False)


def downgrade() -> None:
    """Drop the tables. Folders that wait are found as orphans."""
    op.drop_table("discarded_folders")
    op.drop_table("checkpoint_holds")
