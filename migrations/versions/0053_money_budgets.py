"""Budgets in money: what is spent below a millionth, and tokens without a price. Prices of single tenants.

Revision: 0053
Revises: 0052
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column
from store.tables.prices import Amount

revision = "0053"
down_revision = "0052"
branch_labels = None
depends_on = None

_OF_BUDGET = ("rest", "unpriced")


def upgrade() -> None:
    """Apply."""
    for name in _OF_BUDGET:
        add_column("budgets", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "tenant_prices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("meter", sa.String(32), nullable=False),
        sa.Column("amount", Amount(), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("valid_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_tenant_prices_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_tenant_prices"),
        sa.UniqueConstraint("tenant_id", "base_model", "meter", "valid_from", name="uq_tenant_prices_tenant_id"),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Revert."""
    op.drop_table("tenant_prices")
    for name in _OF_BUDGET:
        op.drop_column("budgets", name)
