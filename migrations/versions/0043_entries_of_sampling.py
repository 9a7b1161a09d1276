"""An index of the audit log's entries on pauses and reloads, which are marks of a run's curve.

Revision: 0043
Revises: 0042
"""

from migrations.online import build_index, drop_index

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

_IS_OF_SAMPLING = "action IN ('gate_pause', 'gate_resume', 'run_reload')"


def upgrade() -> None:
    """Apply."""
    build_index("ix_audit_entries_of_sampling", "audit_entries", ["resource_id", "id"], where=_IS_OF_SAMPLING)


def downgrade() -> None:
    """Revert."""
    drop_index("ix_audit_entries_of_sampling", "audit_entries")
