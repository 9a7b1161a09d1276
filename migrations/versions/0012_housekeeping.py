"""Housekeeping's steps, the service's presence, and partial indexes over what a step looks for.

Revision: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_PARTIAL = (
    ("ix_sessions_silent", "sessions", ["last_seen_at"], "ended_at IS NULL"),
    ("ix_sessions_ended", "sessions", ["ended_at", "id"], "ended_at IS NOT NULL"),
    ("ix_adapter_gates_closed", "adapter_gates", ["expires_at"], "mode IS NOT NULL"),
    ("ix_runs_snapshot_dir", "runs", ["snapshot_dir"], "snapshot_dir IS NOT NULL"),
    ("ix_runs_open", "runs", ["session_id"], "state IN ('creating', 'ready')"),
    ("ix_runs_ended", "runs", ["last_request_at", "id"], "state IN ('unloaded', 'failed')"),
    (
        "ix_runs_forgotten_snapshot",
        "runs",
        ["id"],
        "snapshot_dir IS NOT NULL AND state IN ('unloaded', 'failed')",
    ),
    (
        "ix_runs_covered_payloads",
        "runs",
        ["id"],
        "payloads_dropped_to < snapshot_seq_id "
        "OR (payloads_dropped_to < next_seq_id - 1 AND state IN ('unloaded', 'failed'))",
    ),
    ("ix_checkpoints_nameless", "checkpoints", ["created_at", "id"], "NOT listed"),
    ("ix_checkpoints_nameless_of_run", "checkpoints", ["run_id", "created_at"], "NOT listed"),
)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "housekeeping_steps",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("succeeded_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("handled", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.String(length=200), nullable=True),
        sa.Column("behind_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("failing_since", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_housekeeping_steps")),
        if_not_exists=True,
    )
    op.create_table(
        "service_presence",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("present_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("back_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_service_presence")),
        if_not_exists=True,
    )
    add_column("runs", sa.Column("payloads_dropped_to", sa.BigInteger(), server_default="-1", nullable=False))
    for name, table, columns, condition in _PARTIAL:
        build_index(name, table, columns, where=condition)
    drop_index("ix_sessions_last_seen_at", "sessions")
    drop_index("ix_operation_payloads_kept", "operation_payloads")


def downgrade() -> None:
    """Revert. Payloads that outlived their results are found again by their operations."""
    op.execute(
        "UPDATE operation_payloads SET kept_for_replay = true "
        "WHERE operation_id IN (SELECT id FROM operations WHERE pruned_at IS NOT NULL)"
    )
    kept = sa.text("kept_for_replay")
    op.create_index(
        "ix_operation_payloads_kept",
        "operation_payloads",
        ["operation_id"],
        unique=False,
        sqlite_where=kept,
        postgresql_where=kept,
    )
    op.create_index(op.f("ix_sessions_last_seen_at"), "sessions", ["last_seen_at"], unique=False)
    for name, table, _, _ in _PARTIAL:
        op.drop_index(name, table_name=table)
    op.drop_column("runs", "payloads_dropped_to")
    op.drop_table("service_presence")
    op.drop_table("housekeeping_steps")
