"""Projects of sessions, rights and bounds of API keys, modes of suspension.

Revision: 0030
Revises: 0029
"""

import sqlalchemy as sa
from alembic import op

from migrations.online import add_column, add_reference, build_index, drop_index

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None

_KEY_COLUMNS: dict[str, sa.types.TypeEngine[object]] = {
    "scopes": sa.JSON(),
    "projects": sa.JSON(),
    "expires_at": sa.DateTime(timezone=True),
    "base_models": sa.JSON(),
    "max_rank": sa.Integer(),
    "networks": sa.JSON(),
    "last_used_at": sa.DateTime(timezone=True),
    "made_by": sa.String(64),
}


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "projects",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_projects_tenant_id_tenants")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_projects_tenant_id")),
        if_not_exists=True,
    )
    add_column("api_keys", sa.Column("role", sa.String(16), nullable=False, server_default="member"))
    for name, kind in _KEY_COLUMNS.items():
        add_column("api_keys", sa.Column(name, kind, nullable=True))
    op.create_index("ix_api_keys_made_by", "api_keys", ["made_by"], unique=True, if_not_exists=True)
    add_column("tenants", sa.Column("suspend_mode", sa.String(16), nullable=True))
    add_reference("sessions", "project", "projects")
    add_column("sessions", sa.Column("key_id", sa.Integer(), nullable=True))
    build_index("ix_sessions_project", "sessions", ["project", "created_at"], where="project IS NOT NULL")


def downgrade() -> None:
    """Revert."""
    drop_index("ix_sessions_project", "sessions")
    # SQLite drops a column that names another table's rows only with the table.
    with op.batch_alter_table("sessions") as columns:
        columns.drop_column("project")
        columns.drop_column("key_id")
    op.drop_column("tenants", "suspend_mode")
    op.drop_index("ix_api_keys_made_by", table_name="api_keys")
    for name in (*_KEY_COLUMNS, "role"):
        op.drop_column("api_keys", name)
    op.drop_table("projects")
