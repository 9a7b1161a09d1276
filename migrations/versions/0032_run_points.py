"""Points and own metrics of runs.

Revision: 0032
Revises: 0031
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. The steps of a run that is there are counted from now on."""
    add_column("runs", sa.Column("optimizer_steps", sa.BigInteger(), nullable=False, server_default="0"))
    add_column("runs", sa.Column("metric_names", sa.JSON(), nullable=True))
    add_column("runs", sa.Column("metric_rows", sa.BigInteger(), nullable=False, server_default="0"))
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "run_points",
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("step", number, autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("loss_sum", sa.Float(53), nullable=True),
        sa.Column("loss_weight", sa.Float(53), nullable=False),
        sa.Column("loss_per", sa.String(16), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("sampling_kl_sum", sa.Float(53), nullable=True),
        sa.Column("sampled_tokens", sa.BigInteger(), nullable=False),
        sa.Column("learning_rate", sa.Float(53), nullable=True),
        sa.Column("grad_norm", sa.Float(53), nullable=True),
        sa.Column("adapter_step", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_run_points_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_run_points"),
        if_not_exists=True,
    )
    op.create_table(
        "run_metrics",
        sa.Column("run_id", sa.String(100), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("step", number, autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("value", sa.Float(53), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_run_metrics_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("run_id", "name", "step", name="pk_run_metrics"),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("run_metrics")
    op.drop_table("run_points")
    for column in ("metric_rows", "metric_names", "optimizer_steps"):
        op.drop_column("runs", column)
