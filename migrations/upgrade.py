"""Bring a database's schema to a revision, from code: no ``alembic.ini`` and no current folder needed."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url

_SYNC_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrade the database at ``url`` (async or sync driver). Blocking. Raises SQLAlchemy's and Alembic's errors."""
    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Downgrade the database at ``url`` to ``revision`` (``base``: empty). Blocking."""
    command.downgrade(alembic_config(url), revision)


def current_is_head(url: str) -> bool:
    """Whether the schema at ``url`` is the newest. Blocking."""
    head = ScriptDirectory.from_config(alembic_config(url)).get_current_head()
    engine = create_engine(sync_url(url))
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision() == head
    finally:
        engine.dispose()


def alembic_config(url: str) -> Config:
    """Alembic's configuration for ``url``."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    return config


def sync_url(url: str) -> URL:
    """``url`` with the blocking driver of the same database."""
    parsed = make_url(url)
    return parsed.set(drivername=_SYNC_DRIVERS[parsed.get_backend_name()])
