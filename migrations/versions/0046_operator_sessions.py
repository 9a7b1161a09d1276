"""Sessions of operators' browsers, and keys of operators who look at a tenant.

Revision: 0046
Revises: 0045
"""

import sqlalchemy as sa
from alembic import op

revision = "0046"
down_revision = "0045"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "operator_sessions",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("secret_hash", sa.LargeBinary(32), nullable=False, unique=True),
        sa.Column("operator_key_id", sa.Integer(), sa.ForeignKey("operator_keys.id"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("agent", sa.String(200), nullable=False),
    )
    op.create_index("ix_operator_sessions_operator_key_id", "operator_sessions", ["operator_key_id"])
    op.create_index("ix_operator_sessions_expires_at", "operator_sessions", ["expires_at"])
    op.add_column("api_keys", sa.Column("operator", sa.String(32), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("api_keys", "operator")
    op.drop_table("operator_sessions")
