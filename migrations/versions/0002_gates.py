"""Gates of adapters, samples in flight and their reports.

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "adapter_gates",
        sa.Column("run_id", sa.String(length=520), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=True),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=True),
        sa.Column("reason", sa.String(length=500), nullable=True),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_adapter_gates_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_adapter_gates")),
    )
    op.create_index(op.f("ix_adapter_gates_base_model"), "adapter_gates", ["base_model"], unique=False)
    op.create_table(
        "samples_in_flight",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=True),
        sa.Column("version", sa.String(length=32), nullable=True),
        sa.Column("replica", sa.String(length=200), nullable=False),
        sa.Column("process", sa.String(length=64), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_samples_in_flight_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_samples_in_flight")),
    )
    op.create_index(op.f("ix_samples_in_flight_process"), "samples_in_flight", ["process"], unique=False)
    op.create_index(op.f("ix_samples_in_flight_run_id"), "samples_in_flight", ["run_id"], unique=False)
    op.create_table(
        "sample_reports",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_sample_reports_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_sample_reports")),
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("sample_reports")
    op.drop_index(op.f("ix_samples_in_flight_run_id"), table_name="samples_in_flight")
    op.drop_index(op.f("ix_samples_in_flight_process"), table_name="samples_in_flight")
    op.drop_table("samples_in_flight")
    op.drop_index(op.f("ix_adapter_gates_base_model"), table_name="adapter_gates")
    op.drop_table("adapter_gates")
