"""Rates and budgets of tenants, and each operation's place in the line of its tenant's rate.

Revision: 0040
Revises: 0039
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0040"
down_revision = "0039"
branch_labels = None
depends_on = None

_OF_BUDGET = (("scope", 16), ("scope_id", 64), ("period", 16), ("meter", 16))


def upgrade() -> None:
    """Apply."""
    add_column("operations", sa.Column("rate_mark", sa.BigInteger(), nullable=True))
    op.create_table(
        "rates",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("meter", sa.String(16), nullable=False),
        sa.Column("tat", sa.Double(), nullable=False),
        sa.Column("per_second", sa.Double(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("burst", "charged", "returned")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_rates_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("tenant_id", "meter", name="pk_rates"),
        if_not_exists=True,
    )
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in _OF_BUDGET),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("resets_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_budgets_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("tenant_id", "scope", "scope_id", "period", "meter", name="pk_budgets"),
        if_not_exists=True,
    )
    op.create_table(
        "budget_alerts",
        sa.Column("tenant_id", sa.String(32), nullable=False),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in _OF_BUDGET),
        sa.Column("period_end", sa.String(32), nullable=False),
        sa.Column("percent", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_budget_alerts_tenant_id_tenants"),
        sa.PrimaryKeyConstraint(
            "tenant_id", "scope", "scope_id", "period", "meter", "period_end", "percent", name="pk_budget_alerts"
        ),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("budget_alerts")
    op.drop_table("budgets")
    op.drop_table("rates")
    op.drop_column("operations", "rate_mark")
