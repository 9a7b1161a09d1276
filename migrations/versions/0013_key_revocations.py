"""Index over the revocations of API keys, which every API process looks for.

Revision: 0013
Revises: 0012
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_index(op.f("ix_api_keys_revoked_at"), "api_keys", ["revoked_at"], unique=False)


def downgrade() -> None:
    """Revert."""
    op.drop_index(op.f("ix_api_keys_revoked_at"), table_name="api_keys")
