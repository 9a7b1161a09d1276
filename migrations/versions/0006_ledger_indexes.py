"""Partial indexes over the rows that the ledger looks for, and payloads that outlive their results.

Revision: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_PARTIAL = (
    ("ix_operations_pending_training", ["base_model", "position"], "state = 'pending' AND kind <> 'sample'"),
    ("ix_operations_pending_samples_of_base", ["base_model", "position"], "state = 'pending' AND kind = 'sample'"),
    ("ix_operations_unpruned", ["finished_at"], "finished_at IS NOT NULL AND pruned_at IS NULL"),
)


def upgrade() -> None:
    """Apply."""
    for name, columns, condition in _PARTIAL:
        where = sa.text(condition)
        op.create_index(name, "operations", columns, unique=False, sqlite_where=where, postgresql_where=where)
    op.drop_index("ix_operations_state_kind_position", table_name="operations")
    op.drop_index("ix_operations_finished_at", table_name="operations")
    with op.batch_alter_table("operation_payloads") as payloads:
        payloads.add_column(sa.Column("kept_for_replay", sa.Boolean(), server_default=sa.false(), nullable=False))
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


def downgrade() -> None:
    """Revert."""
    op.drop_index("ix_operation_payloads_kept", table_name="operation_payloads")
    with op.batch_alter_table("operation_payloads") as payloads:
        payloads.drop_column("kept_for_replay")
    op.create_index("ix_operations_finished_at", "operations", ["finished_at"], unique=False)
    op.create_index("ix_operations_state_kind_position", "operations", ["state", "kind", "position"], unique=False)
    for name, _, _ in _PARTIAL:
        op.drop_index(name, table_name="operations")
