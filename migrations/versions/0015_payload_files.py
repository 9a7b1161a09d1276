"""Large payloads are in files of the data folder; their rows hold the file's digest.

Revision: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the digest's column."""
    with op.batch_alter_table("operation_payloads") as payloads:
        payloads.add_column(sa.Column("file_digest", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Drop the column. Operations whose payloads are in files can then not be read: downgrade while none is pending."""
    with op.batch_alter_table("operation_payloads") as payloads:
        payloads.drop_column("file_digest")
