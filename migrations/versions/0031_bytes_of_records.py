"""Sizes of the records of samples, and their places among the bytes that a tenant has recorded.

Revision: 0031
Revises: 0030
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    add_column("sample_records", sa.Column("start_byte", sa.BigInteger(), nullable=True))
    add_column("sample_records", sa.Column("size_bytes", sa.BigInteger(), nullable=True))
    build_index("ix_sample_records_bytes", "sample_records", ["tenant_id", "start_byte", "size_bytes"])


def downgrade() -> None:
    """Revert."""
    drop_index("ix_sample_records_bytes", "sample_records")
    with op.batch_alter_table("sample_records") as columns:
        columns.drop_column("size_bytes")
        columns.drop_column("start_byte")
