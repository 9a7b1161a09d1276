"""Index over the times of budgets' alerts: operators read those of all tenants, the newest first.

Revision: 0060
Revises: 0059
"""

from migrations.online import build_index, drop_index

revision = "0060"
down_revision = "0059"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    build_index("ix_budget_alerts_at", "budget_alerts", ["at"])


def downgrade() -> None:
    """Revert."""
    drop_index("ix_budget_alerts_at", "budget_alerts")
