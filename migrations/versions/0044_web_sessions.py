"""Web sessions of the dashboard, and one-time codes that begin them.

Revision: 0044
Revises: 0043
"""

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0043"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "web_sessions",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("token_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("agent", sa.String(200), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_web_sessions_key_id_api_keys"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_web_sessions_tenant_id_tenants"),
        sa.PrimaryKeyConstraint("id", name="pk_web_sessions"),
        sa.UniqueConstraint("token_hash", name="uq_web_sessions_token_hash"),
        if_not_exists=True,
    )
    for column in ("key_id", "tenant_id", "expires_at"):
        op.create_index(f"ix_web_sessions_{column}", "web_sessions", [column], if_not_exists=True)
    op.create_table(
        "login_codes",
        sa.Column("code_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_login_codes_key_id_api_keys"),
        sa.PrimaryKeyConstraint("code_hash", name="pk_login_codes"),
        if_not_exists=True,
    )
    for column in ("key_id", "expires_at"):
        op.create_index(f"ix_login_codes_{column}", "login_codes", [column], if_not_exists=True)


def downgrade() -> None:
    """Revert."""
    op.drop_table("login_codes")
    op.drop_table("web_sessions")
