"""Indexes for looks at a rare action of the audit log, and at a tenant's links and directives when it is removed.

Revision: 0047
Revises: 0046
"""

from migrations.online import build_index, drop_index

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    build_index("ix_audit_entries_action_at_id", "audit_entries", ["action", "at", "id"])
    build_index("ix_download_links_tenant_id", "download_links", ["tenant_id"])
    build_index("ix_directed_runs_tenant_id", "directed_runs", ["tenant_id"])


def downgrade() -> None:
    """Revert."""
    drop_index("ix_directed_runs_tenant_id", "directed_runs")
    drop_index("ix_download_links_tenant_id", "download_links")
    drop_index("ix_audit_entries_action_at_id", "audit_entries")
