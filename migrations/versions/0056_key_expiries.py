"""Index over the times at which API keys expire: every API process looks for keys that have ended.

Revision: 0056
Revises: 0055
"""

from alembic import op

from migrations.online import build_index, drop_index

revision = "0056"
down_revision = "0055"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    build_index(op.f("ix_api_keys_expires_at"), "api_keys", ["expires_at"])


def downgrade() -> None:
    """Revert."""
    drop_index(op.f("ix_api_keys_expires_at"), "api_keys")
