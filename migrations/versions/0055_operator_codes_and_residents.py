"""One-time codes of operators, and the runs that are in a trainer's memory.

Revision: 0055
Revises: 0054
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column

revision = "0055"
down_revision = "0054"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "operator_codes",
        sa.Column("code_hash", sa.LargeBinary(32), nullable=False),
        sa.Column("operator_key_id", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["operator_key_id"], ["operator_keys.id"], name="fk_operator_codes_operator_key_id_operator_keys"
        ),
        sa.PrimaryKeyConstraint("code_hash", name="pk_operator_codes"),
        if_not_exists=True,
    )
    for column in ("operator_key_id", "expires_at"):
        op.create_index(f"ix_operator_codes_{column}", "operator_codes", [column], if_not_exists=True)
    add_column("worker_processes", sa.Column("resident_runs", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Revert."""
    op.drop_column("worker_processes", "resident_runs")
    op.drop_table("operator_codes")
