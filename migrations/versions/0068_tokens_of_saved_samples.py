"""The tokens of a sample's saved progress, for samples that are cancelled between two sampling processes.

Revision: 0068
Revises: 0067
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0068"
down_revision = "0067"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. What a process of a version before saves has none, and counts nothing when it is cancelled."""
    for name in ("drawn", "cached"):
        add_column("sample_progress", sa.Column(name, sa.BigInteger()))


def downgrade() -> None:
    """Revert."""
    for name in ("cached", "drawn"):
        op.drop_column("sample_progress", name)
