"""Samples held by closed gates, indexes to claim samples tenant by tenant, states of pools, and ends of endless pauses.

Revision: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, build_index, drop_index

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_PENDING = "state = 'pending' AND kind = 'sample'"
_INDEXES = (
    ("waiting", ["base_model", "tenant_id", "position"], f"{_PENDING} AND taken_by IS NULL AND held_by IS NULL"),
    ("claimed", ["taken_by"], f"{_PENDING} AND taken_by IS NOT NULL"),
    ("held", ["base_model", "held_by"], f"{_PENDING} AND held_by IS NOT NULL"),
)
_ALL_OF_BASE = "ix_operations_pending_samples_of_base"
_DAYS = 7


def upgrade() -> None:
    """Apply."""
    add_column("operations", sa.Column("held_by", sa.String(length=100), nullable=True))
    add_column(
        "worker_processes", sa.Column("pool_state", sa.String(length=16), server_default="working", nullable=False)
    )
    for name, columns, condition in _INDEXES:
        build_index(f"ix_operations_pending_samples_{name}", "operations", columns, where=condition)
    drop_index(_ALL_OF_BASE, "operations")
    gates = sa.table("adapter_gates", sa.column("mode"), sa.column("expires_at"))
    is_sqlite = op.get_bind().dialect.name == "sqlite"
    last = sa.func.datetime("now", f"+{_DAYS} days") if is_sqlite else sa.text(f"now() + interval '{_DAYS} days'")
    endless = gates.c.mode.is_not(None) & gates.c.expires_at.is_(None)
    op.execute(gates.update().where(endless).values(expires_at=last))


def downgrade() -> None:
    """Revert. Pauses keep their ends."""
    build_index(_ALL_OF_BASE, "operations", ["base_model", "position"], where=_PENDING)
    for name, _, _ in _INDEXES:
        drop_index(f"ix_operations_pending_samples_{name}", "operations")
    # No batch mode: it would make the whole table anew.
    op.drop_column("worker_processes", "pool_state")
    op.drop_column("operations", "held_by")
