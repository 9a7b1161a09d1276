"""The audit log: entries that only grow, and a digest of each day.

Revision: 0041
Revises: 0040
"""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None

_FUNCTIONS = {
    "audit_entries": """
        CREATE OR REPLACE FUNCTION audit_entries_stay() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'DELETE' THEN
                IF EXISTS (SELECT 1 FROM audit_digests WHERE day = OLD.day AND expired_at IS NOT NULL) THEN
                    RETURN OLD;
                END IF;
            END IF;
            RAISE EXCEPTION 'audit_entries only grows; housekeeping deletes what has expired';
        END $$
    """,
    "audit_digests": """
        CREATE OR REPLACE FUNCTION audit_digests_stay() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'UPDATE' THEN
                IF NEW.day = OLD.day AND NEW.next_day = OLD.next_day AND NEW.closed_at = OLD.closed_at
                    AND NEW.digest IS NOT NULL AND NEW.entries IS NOT NULL
                    AND (OLD.digest IS NULL AND NEW.expired_at IS NULL
                        OR NEW.digest = OLD.digest AND NEW.entries = OLD.entries AND OLD.expired_at IS NULL) THEN
                    RETURN NEW;
                END IF;
            END IF;
            RAISE EXCEPTION 'audit_digests only grows; a digest is computed once and expires once';
        END $$
    """,
}
_SQLITE_TRIGGERS = (
    """
    CREATE TRIGGER IF NOT EXISTS audit_entries_update BEFORE UPDATE ON audit_entries BEGIN
        SELECT RAISE(ABORT, 'audit_entries only grows');
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS audit_entries_delete BEFORE DELETE ON audit_entries
    WHEN NOT EXISTS (SELECT 1 FROM audit_digests WHERE day = OLD.day AND expired_at IS NOT NULL) BEGIN
        SELECT RAISE(ABORT, 'audit_entries only grows; housekeeping deletes what has expired');
    END
    """,
    # REPLACE deletes a row without a trigger.
    """
    CREATE TRIGGER IF NOT EXISTS audit_entries_replace BEFORE INSERT ON audit_entries
    WHEN EXISTS (SELECT 1 FROM audit_entries WHERE id = NEW.id) BEGIN
        SELECT RAISE(ABORT, 'audit_entries only grows');
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS audit_digests_update BEFORE UPDATE ON audit_digests
    WHEN NOT (NEW.day = OLD.day AND NEW.next_day = OLD.next_day AND NEW.closed_at = OLD.closed_at
        AND NEW.digest IS NOT NULL AND NEW.entries IS NOT NULL
        AND (OLD.digest IS NULL AND NEW.expired_at IS NULL
            OR NEW.digest IS OLD.digest AND NEW.entries IS OLD.entries AND OLD.expired_at IS NULL)) BEGIN
        SELECT RAISE(ABORT, 'audit_digests only grows; a digest is computed once and expires once');
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS audit_digests_delete BEFORE DELETE ON audit_digests BEGIN
        SELECT RAISE(ABORT, 'audit_digests only grows');
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS audit_digests_replace BEFORE INSERT ON audit_digests
    WHEN EXISTS (SELECT 1 FROM audit_digests WHERE day = NEW.day) BEGIN
        SELECT RAISE(ABORT, 'audit_digests only grows');
    END
    """,
)


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "audit_entries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("tenant_id", sa.String(32), nullable=True),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("key_id", sa.Integer(), nullable=True),
        sa.Column("role", sa.String(16), nullable=True),
        sa.Column("door", sa.String(16), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(32), nullable=False),
        sa.Column("resource_id", sa.String(500), nullable=False),
        sa.Column("project", sa.String(64), nullable=True),
        sa.Column("before", sa.JSON(), nullable=True),
        sa.Column("after", sa.JSON(), nullable=True),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("trace_id", sa.String(32), nullable=True),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit_entries"),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_index("ix_audit_entries_tenant_id_at_id", "audit_entries", ["tenant_id", "at", "id"], if_not_exists=True)
    op.create_index("ix_audit_entries_day_id", "audit_entries", ["day", "id"], if_not_exists=True)
    op.create_index("ix_audit_entries_at_id", "audit_entries", ["at", "id"], if_not_exists=True)
    op.create_table(
        "audit_digests",
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("next_day", sa.Date(), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(64), nullable=True),
        sa.Column("expired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("day", name="pk_audit_digests"),
        if_not_exists=True,
    )
    if op.get_bind().dialect.name != "postgresql":
        for trigger in _SQLITE_TRIGGERS:
            op.get_bind().exec_driver_sql(trigger)
        return
    for table, function in _FUNCTIONS.items():
        op.get_bind().exec_driver_sql(function)
        for name, moment in (("row", "UPDATE OR DELETE"), ("all", "TRUNCATE")):
            op.execute(f"DROP TRIGGER IF EXISTS {table}_{name} ON {table}")
            each = "ROW" if name == "row" else "STATEMENT"
            op.execute(
                f"CREATE TRIGGER {table}_{name} BEFORE {moment} ON {table} FOR EACH {each} EXECUTE FUNCTION {table}_stay()"
            )


def downgrade() -> None:
    """Revert."""
    for table in ("audit_entries", "audit_digests"):
        op.drop_table(table)
        if op.get_bind().dialect.name == "postgresql":
            op.execute(f"DROP FUNCTION {table}_stay()")
