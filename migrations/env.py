"""Alembic's entry: runs revisions against the URL given by ``migrations.upgrade``, or ``-x url=…`` on its command line."""

from alembic import context
from sqlalchemy import create_engine

from migrations.upgrade import sync_url
from store.tables import Base

LOCK_TIMEOUT = "5s"
"""Longest wait for a lock: every statement on the table queues behind a migration that waits."""


def run_migrations() -> None:
    """Run the revisions in one transaction."""
    url = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True)["url"]
    engine = create_engine(sync_url(url))
    try:
        with engine.connect() as connection:
            is_sqlite = connection.dialect.name == "sqlite"
            if not is_sqlite:
                connection.exec_driver_sql(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
            context.configure(
                connection=connection, target_metadata=Base.metadata, render_as_batch=is_sqlite, compare_type=True
            )
            with context.begin_transaction():
                context.run_migrations()
            connection.commit()
    finally:
        engine.dispose()


run_migrations()
