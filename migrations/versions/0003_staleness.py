"""Bounds on the age of live samples, and an index by which a tenant's pending samples are counted.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_PENDING = sa.text("state = 'pending' AND kind = 'sample'")


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("samplers") as samplers:
        samplers.add_column(sa.Column("publications", sa.BigInteger(), server_default="0", nullable=False))
        samplers.add_column(sa.Column("max_version_lag", sa.Integer(), nullable=True))
        samplers.add_column(sa.Column("on_stale", sa.String(length=8), nullable=True))
    op.create_index(
        "ix_operations_pending_samples",
        "operations",
        ["tenant_id"],
        unique=False,
        sqlite_where=_PENDING,
        postgresql_where=_PENDING,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_index("ix_operations_pending_samples", table_name="operations")
    with op.batch_alter_table("samplers") as samplers:
        samplers.drop_column("on_stale")
        samplers.drop_column("max_version_lag")
        samplers.drop_column("publications")
