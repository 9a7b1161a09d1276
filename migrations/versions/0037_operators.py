"""Keys of the service's own operators, and the deletion of tenants.

Revision: 0037
Revises: 0036
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "operator_keys",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("prefix", sa.String(32), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("note", sa.String(200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.Column("last_used_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("prefix", name="uq_operator_keys_prefix"),
        if_not_exists=True,
    )
    for name in ("delete_at", "deleted_at"):
        add_column("tenants", sa.Column(name, sa.DateTime(timezone=True), nullable=True))
    build_index("ix_tenants_delete_at", "tenants", ["delete_at"], where="delete_at IS NOT NULL AND deleted_at IS NULL")


def downgrade() -> None:
    """Revert."""
    drop_index("ix_tenants_delete_at", "tenants")
    with op.batch_alter_table("tenants") as tenants:
        for name in ("delete_at", "deleted_at"):
            tenants.drop_column(name)
    op.drop_table("operator_keys")
