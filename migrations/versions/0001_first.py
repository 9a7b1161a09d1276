"""The first schema: tenants, sessions, runs, checkpoints, samplers and the ledger of operations.

Revision: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("share", sa.Float(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("prefix", sa.String(length=32), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("note", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("prefix", name=op.f("uq_api_keys_prefix")),
    )
    op.create_index(op.f("ix_api_keys_tenant_id"), "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "operation_payloads",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_operation_payloads_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_operation_payloads")),
    )
    op.create_table(
        "operation_results",
        sa.Column("operation_id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_operation_results_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("operation_id", name=op.f("pk_operation_results")),
    )
    op.create_table(
        "operations",
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("lane", sa.String(length=100), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("body_digest", sa.LargeBinary(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_category", sa.String(length=16), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("result_bytes", sa.BigInteger(), nullable=True),
        sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_operations_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("position", name=op.f("pk_operations")),
        sa.UniqueConstraint("id", name=op.f("uq_operations_id")),
        sa.UniqueConstraint("lane", "seq_id", name=op.f("uq_operations_lane")),
    )
    op.create_index("ix_operations_finished_at", "operations", ["finished_at"], unique=False)
    op.create_index("ix_operations_state_kind_position", "operations", ["state", "kind", "position"], unique=False)
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("sdk_version", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=200), nullable=True),
        sa.Column("display_name", sa.String(length=200), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("end_reason", sa.String(length=32), nullable=True),
        sa.Column("end_detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_sessions_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_last_seen_at"), "sessions", ["last_seen_at"], unique=False)
    op.create_index("ix_sessions_tenant_id_created_at", "sessions", ["tenant_id", "created_at"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=100), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("alpha", sa.Double(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("next_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_dir", sa.String(length=500), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_request_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_runs_session_id_sessions")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_runs_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("session_id", "model_seq_id", name=op.f("uq_runs_session_id")),
    )
    op.create_index(op.f("ix_runs_session_id"), "runs", ["session_id"], unique=False)
    op.create_index("ix_runs_tenant_id_created_at", "runs", ["tenant_id", "created_at"], unique=False)
    op.create_table(
        "samplers",
        sa.Column("id", sa.String(length=100), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("sampling_session_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("model_path", sa.String(length=500), nullable=True),
        sa.Column("checkpoint_id", sa.String(length=32), nullable=True),
        sa.Column("live_run_id", sa.String(length=100), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name=op.f("fk_samplers_session_id_sessions")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_samplers_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_samplers")),
        sa.UniqueConstraint("session_id", "sampling_session_seq_id", name=op.f("uq_samplers_session_id")),
    )
    op.create_index(op.f("ix_samplers_checkpoint_id"), "samplers", ["checkpoint_id"], unique=False)
    op.create_index(op.f("ix_samplers_live_run_id"), "samplers", ["live_run_id"], unique=False)
    op.create_index(op.f("ix_samplers_tenant_id"), "samplers", ["tenant_id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=100), nullable=False),
        sa.Column("segment", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("directory", sa.String(length=500), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("listed", sa.Boolean(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id_runs")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_checkpoints_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("run_id", "segment", "name", name=op.f("uq_checkpoints_run_id")),
    )
    op.create_index(op.f("ix_checkpoints_expires_at"), "checkpoints", ["expires_at"], unique=False)
    op.create_index("ix_checkpoints_tenant_id_created_at", "checkpoints", ["tenant_id", "created_at"], unique=False)


def downgrade() -> None:
    """Revert."""
    op.drop_index("ix_checkpoints_tenant_id_created_at", table_name="checkpoints")
    op.drop_index(op.f("ix_checkpoints_expires_at"), table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_index(op.f("ix_samplers_tenant_id"), table_name="samplers")
    op.drop_index(op.f("ix_samplers_live_run_id"), table_name="samplers")
    op.drop_index(op.f("ix_samplers_checkpoint_id"), table_name="samplers")
    op.drop_table("samplers")
    op.drop_index("ix_runs_tenant_id_created_at", table_name="runs")
    op.drop_index(op.f("ix_runs_session_id"), table_name="runs")
    op.drop_table("runs")
    op.drop_index("ix_sessions_tenant_id_created_at", table_name="sessions")
    op.drop_index(op.f("ix_sessions_last_seen_at"), table_name="sessions")
    op.drop_table("sessions")
    op.drop_index("ix_operations_state_kind_position", table_name="operations")
    op.drop_index("ix_operations_finished_at", table_name="operations")
    op.drop_table("operations")
    op.drop_table("operation_results")
    op.drop_table("operation_payloads")
    op.drop_index(op.f("ix_api_keys_tenant_id"), table_name="api_keys")
    op.drop_table("api_keys")
    op.drop_table("tenants")
