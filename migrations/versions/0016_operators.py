"""Operators' directives: runs moved and evicted, trainers drained, tenants suspended; and the runs' history.

Revision: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_IS_SUSPENDED = sa.text("suspended_at IS NOT NULL")


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "run_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("trainer", sa.String(length=64), nullable=True),
        sa.Column("lease_token", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.String(length=500), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_run_events_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run_events")),
    )
    op.create_index(op.f("ix_run_events_at"), "run_events", ["at"], unique=False)
    op.create_index("ix_run_events_run_id_id", "run_events", ["run_id", "id"], unique=False)
    op.create_table(
        "directed_runs",
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("wanted", sa.String(length=8), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=True),
        sa.Column("reason", sa.String(length=500), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_directed_runs_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_directed_runs")),
    )
    op.add_column("worker_processes", sa.Column("drained_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("worker_processes", sa.Column("drain_reason", sa.String(length=500), nullable=True))
    op.add_column("tenants", sa.Column("suspended_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("tenants", sa.Column("suspend_reason", sa.String(length=500), nullable=True))
    op.create_index(
        "ix_tenants_suspended",
        "tenants",
        ["id"],
        unique=False,
        sqlite_where=_IS_SUSPENDED,
        postgresql_where=_IS_SUSPENDED,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_index("ix_tenants_suspended", table_name="tenants")
    op.drop_column("tenants", "suspend_reason")
    op.drop_column("tenants", "suspended_at")
    op.drop_column("worker_processes", "drain_reason")
    op.drop_column("worker_processes", "drained_at")
    op.drop_table("directed_runs")
    op.drop_index("ix_run_events_run_id_id", table_name="run_events")
    op.drop_index(op.f("ix_run_events_at"), table_name="run_events")
    op.drop_table("run_events")
