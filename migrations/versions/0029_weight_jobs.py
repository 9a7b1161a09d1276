"""Jobs on weights.

Revision: 0029
Revises: 0028
"""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "weight_jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("checkpoint_id", sa.String(length=32), nullable=False),
        sa.Column("done_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("taken_by", sa.String(length=32), nullable=True),
        sa.Column("taken_until", _TIME, nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("started_at", _TIME, nullable=True),
        sa.Column("finished_at", _TIME, nullable=True),
        sa.Column("cancelled_at", _TIME, nullable=True),
        sa.Column("result_path", sa.String(length=500), nullable=True),
        sa.Column("error_code", sa.String(length=64), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_weight_jobs_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_weight_jobs")),
    )
    op.create_index("ix_weight_jobs_tenant_id_created_at", "weight_jobs", ["tenant_id", "created_at"])
    unfinished, finished = sa.text("state IN ('pending', 'running')"), sa.text("finished_at IS NOT NULL")
    op.create_index(
        "ix_weight_jobs_unfinished",
        "weight_jobs",
        ["created_at", "id"],
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )
    op.create_index(
        "ix_weight_jobs_finished", "weight_jobs", ["finished_at"], sqlite_where=finished, postgresql_where=finished
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("weight_jobs")
