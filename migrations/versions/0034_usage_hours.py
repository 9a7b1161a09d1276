"""Usage by hour, session, run and key; prompt, cached and sampled tokens apart.

Revision: 0034
Revises: 0033
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None

_SUMS = ("operations", "failed", "train_tokens", "prompt_tokens", "cached_prompt_tokens", "sampled_tokens")


def upgrade() -> None:
    """Apply. Of a sample that ended before, all tokens count as its prompt's."""
    for name in ("sampled_tokens", "cached_tokens"):
        add_column("operations", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    unpruned = "finished_at IS NOT NULL AND pruned_at IS NULL"
    build_index("ix_operations_unpruned_of_tenant", "operations", ["tenant_id", "finished_at"], where=unpruned)
    add_column("service_presence", sa.Column("storage_metered_to", sa.DateTime(timezone=True), nullable=True))
    op.create_table(
        "usage_hours",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("session_id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("key_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("project", sa.String(64), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _SUMS),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_usage_hours_tenant_id_tenants"),
        sa.PrimaryKeyConstraint(
            "tenant_id", "hour", "session_id", "run_id", "key_id", "base_model", "kind", name="pk_usage_hours"
        ),
        if_not_exists=True,
    )
    op.create_table(
        "storage_hours",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("checkpoints", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_storage_hours_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("tenant_id", "hour", "project", name="pk_storage_hours"),
        if_not_exists=True,
    )
    op.create_index("ix_storage_hours_hour", "storage_hours", ["hour"], if_not_exists=True)
    op.create_index("ix_usage_hours_session_id", "usage_hours", ["session_id"], if_not_exists=True)
    op.create_index("ix_usage_hours_hour", "usage_hours", ["hour"], if_not_exists=True)


def downgrade() -> None:
    """Revert."""
    op.drop_column("service_presence", "storage_metered_to")
    op.drop_table("storage_hours")
    op.drop_table("usage_hours")
    drop_index("ix_operations_unpruned_of_tenant", "operations")
    for name in ("cached_tokens", "sampled_tokens"):
        op.drop_column("operations", name)
