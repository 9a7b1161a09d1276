"""Rates of keys and projects, and each operation's places in their lines.

Revision: 0058
Revises: 0057
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0058"
down_revision = "0057"
branch_labels = None
depends_on = None

_OF_LINE = (("scope", 16), ("scope_id", 64), ("meter", 16))


def upgrade() -> None:
    """Apply."""
    add_column("api_keys", sa.Column("limits", sa.JSON(), nullable=True))
    op.create_table(
        "rate_lines",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in _OF_LINE),
        sa.Column("tat", sa.Double(), nullable=False),
        sa.Column("per_second", sa.Double(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("burst", "charged", "returned")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_rate_lines_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_rate_lines"),
        sa.UniqueConstraint("tenant_id", "scope", "scope_id", "meter", name="uq_rate_lines_tenant_id"),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_table(
        "rate_places",
        sa.Column("operation_id", sa.String(36), nullable=False),
        sa.Column("line_id", sa.Integer(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("mark", "cost")),
        sa.PrimaryKeyConstraint("operation_id", "line_id", name="pk_rate_places"),
        if_not_exists=True,
    )
    op.create_index("ix_rate_places_line_id_mark", "rate_places", ["line_id", "mark"], if_not_exists=True)


def downgrade() -> None:
    """Revert."""
    op.drop_table("rate_places")
    op.drop_table("rate_lines")
    op.drop_column("api_keys", "limits")
