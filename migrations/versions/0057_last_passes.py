"""Last passes of trainers, and the version of weft that a process runs.

Revision: 0057
Revises: 0056
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0057"
down_revision = "0056"
branch_labels = None
depends_on = None

_COLUMNS: tuple[tuple[str, sa.types.TypeEngine[object]], ...] = (
    ("release", sa.String(64)),
    ("pass_ended_at", sa.DateTime(timezone=True)),
    ("pass_seconds", sa.Double()),
    ("pass_tokens", sa.BigInteger()),
    ("pass_positions", sa.BigInteger()),
    ("pass_sequences", sa.Integer()),
    ("pass_adapters", sa.Integer()),
    ("pass_tenants", sa.Integer()),
)


def upgrade() -> None:
    """Apply."""
    for name, type_ in _COLUMNS:
        add_column("worker_processes", sa.Column(name, type_, nullable=True))


def downgrade() -> None:
    """Revert."""
    for name, _ in reversed(_COLUMNS):
        op.drop_column("worker_processes", name)
