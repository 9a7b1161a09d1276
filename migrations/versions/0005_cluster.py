"""Tables and columns of a cluster: worker processes, leases of runs, placements, and version commands.

Revision: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "worker_processes",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("host", sa.String(length=200), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_processes")),
    )
    op.create_table(
        "placements",
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("announced_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_placements_run_id_runs")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_placements_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_placements")),
    )
    op.create_index(op.f("ix_placements_base_model"), "placements", ["base_model"], unique=False)
    op.create_table(
        "version_orders",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("process_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=True),
        sa.Column("version", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("done_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_version_orders")),
    )
    op.create_index(op.f("ix_version_orders_process_id"), "version_orders", ["process_id"], unique=False)
    with op.batch_alter_table("runs") as runs:
        runs.add_column(sa.Column("trainer_id", sa.String(length=64), nullable=True))
        runs.add_column(sa.Column("lease_token", sa.BigInteger(), server_default="0", nullable=False))
    op.create_index(op.f("ix_runs_trainer_id"), "runs", ["trainer_id"], unique=False)
    with op.batch_alter_table("operations") as operations:
        operations.add_column(sa.Column("taken_by", sa.String(length=64), nullable=True))


def downgrade() -> None:
    """Revert."""
    with op.batch_alter_table("operations") as operations:
        operations.drop_column("taken_by")
    op.drop_index(op.f("ix_runs_trainer_id"), table_name="runs")
    with op.batch_alter_table("runs") as runs:
        runs.drop_column("lease_token")
        runs.drop_column("trainer_id")
    op.drop_index(op.f("ix_version_orders_process_id"), table_name="version_orders")
    op.drop_table("version_orders")
    op.drop_index(op.f("ix_placements_base_model"), table_name="placements")
    op.drop_table("placements")
    op.drop_table("worker_processes")
