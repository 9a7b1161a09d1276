"""Indexes from which a tenant's long list of sessions, and of those that were lost, are read alone.

Revision: 0062
Revises: 0061
"""

from migrations.online import build_index, drop_index

revision = "0062"
down_revision = "0061"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    build_index("ix_sessions_listed", "sessions", ["tenant_id", "created_at", "id"])
    build_index("ix_sessions_lost", "sessions", ["tenant_id", "ended_at", "id"], where="end_reason = 'timed_out'")
    drop_index("ix_sessions_tenant_id_created_at", "sessions")


def downgrade() -> None:
    """Revert."""
    build_index("ix_sessions_tenant_id_created_at", "sessions", ["tenant_id", "created_at"])
    drop_index("ix_sessions_lost", "sessions")
    drop_index("ix_sessions_listed", "sessions")
