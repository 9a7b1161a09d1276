"""Answers to operators' changes, for repeats of them.

Revision: 0049
Revises: 0048
"""

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "operator_answers",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("asked", sa.String(64), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_operator_answers_at", "operator_answers", ["at"])


def downgrade() -> None:
    """Revert."""
    op.drop_table("operator_answers")
