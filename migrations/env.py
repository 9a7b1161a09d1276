"""Alembic's entry: runs revisions against the URL given by ``migrations.upgrade``, or ``-x url=…`` on its command line."""

from alembic import context

from migrations.online import LOCK_TIMEOUT
from migrations.upgrade import blocking_engine
from store.tables import Base


def run_migrations() -> None:
    """Run each revision in a transaction of its own, so that a revision that fails leaves those before it applied."""
    url = context.config.attributes.get("url") or context.get_x_argument(as_dictionary=True)["url"]
    engine = blocking_engine(url)
    try:
        with engine.connect() as connection:
            is_sqlite = connection.dialect.name == "sqlite"
            if not is_sqlite:
                connection.exec_driver_sql(f"SET lock_timeout = '{LOCK_TIMEOUT}'")
                connection.commit()
            context.configure(
                connection=connection,
                target_metadata=Base.metadata,
                render_as_batch=is_sqlite,
                compare_type=True,
                transactional_ddl=True,
                transaction_per_migration=True,
            )
            with context.begin_transaction():
                context.run_migrations()
    finally:
        engine.dispose()


run_migrations()
