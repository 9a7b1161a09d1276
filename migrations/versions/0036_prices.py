"""Prices of tokens and storage.

Revision: 0036
Revises: 0035
"""

import sqlalchemy as sa
from alembic import op

from store.tables.prices import Amount

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "prices",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(500), nullable=False),
        sa.Column("meter", sa.String(32), nullable=False),
        sa.Column("amount", Amount(), nullable=False),
        sa.Column("currency", sa.String(3), nullable=False),
        sa.Column("valid_from", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_prices"),
        sa.UniqueConstraint("base_model", "meter", "valid_from", name="uq_prices_base_model"),
        if_not_exists=True,
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("prices")
