"""Indexes for what operators ask of many years' rows, and dead rows of the ledger's tables cleared away sooner.

Each operation leaves several dead rows within seconds. By default PostgreSQL clears a table once a fifth of it is dead. In a
table of millions, the small indexes of pending operations would hold hundreds of thousands of dead entries until then, and
every look at what is pending would read them.

Revision: 0022
Revises: 0021
"""

from alembic import op

from migrations.online import build_index, drop_index

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_FAILED = "state = 'failed'"
_CLEARED = (
    "operations",
    "operation_payloads",
    "operation_results",
    "runs",
    "sessions",
    "samplers",
    "samples_in_flight",
)
_SETTINGS = {"autovacuum_vacuum_scale_factor": 0.01, "autovacuum_analyze_scale_factor": 0.02}


def upgrade() -> None:
    """Apply."""
    build_index("ix_operations_failed", "operations", ["position"], where=_FAILED)
    build_index("ix_operations_failed_of_tenant", "operations", ["tenant_id", "position"], where=_FAILED)
    build_index("ix_usage_days_day", "usage_days", ["day"])
    _alter_cleared("SET (" + ", ".join(f"{name} = {value}" for name, value in _SETTINGS.items()) + ")")


def downgrade() -> None:
    """Revert."""
    _alter_cleared("RESET (" + ", ".join(_SETTINGS) + ")")
    drop_index("ix_usage_days_day", "usage_days")
    for name in ("ix_operations_failed_of_tenant", "ix_operations_failed"):
        drop_index(name, "operations")


def _alter_cleared(change: str) -> None:
    """Change storage settings of PostgreSQL's tables, under a lock that no reader and no writer waits for."""
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in _CLEARED:
        with op.get_context().autocommit_block():
            op.execute(f"ALTER TABLE {table} {change}")
