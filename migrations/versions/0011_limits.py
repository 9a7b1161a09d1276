"""Limits of tenants, and the columns and indexes from which their use is counted.

Revision: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_PENDING_SAMPLE = "state = 'pending' AND kind = 'sample'"
_PARTIAL = (
    (
        "ix_operations_pending_bytes",
        "operations",
        ["tenant_id", "payload_bytes"],
        "state = 'pending' AND kind <> 'sample'",
    ),
    ("ix_runs_snapshots", "runs", ["tenant_id", "snapshot_bytes"], "snapshot_dir IS NOT NULL"),
    ("ix_runs_ready", "runs", ["tenant_id"], "state = 'ready'"),
    ("ix_sessions_open", "sessions", ["tenant_id"], "ended_at IS NULL"),
)


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)


def upgrade() -> None:
    """Apply. Adding a column with a constant default rewrites no table."""
    add_column("tenants", sa.Column("limits", sa.JSON(), nullable=True))
    add_column("operations", _number("payload_bytes"))
    add_column("operations", _number("reserved_tokens"))
    add_column("runs", _number("snapshot_bytes"))
    for name, table, columns, condition in _PARTIAL:
        build_index(name, table, columns, where=condition)
    build_index("ix_checkpoints_tenant_id_size_bytes", "checkpoints", ["tenant_id", "size_bytes"])
    _index_pending_samples(["tenant_id", "reserved_tokens"])


def downgrade() -> None:
    """Revert."""
    _index_pending_samples(["tenant_id"])
    op.drop_index(op.f("ix_checkpoints_tenant_id_size_bytes"), table_name="checkpoints")
    for name, table, _, _ in _PARTIAL:
        op.drop_index(name, table_name=table)
    # No batch mode: it would make the whole table anew.
    op.drop_column("runs", "snapshot_bytes")
    op.drop_column("operations", "reserved_tokens")
    op.drop_column("operations", "payload_bytes")
    op.drop_column("tenants", "limits")


def _index_pending_samples(columns: list[str]) -> None:
    drop_index("ix_operations_pending_samples", "operations")
    build_index("ix_operations_pending_samples", "operations", columns, where=_PENDING_SAMPLE)
