"""Upgrades and downgrades of a database's schema by Alembic, called from code without an ``alembic.ini``."""

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.engine import URL, make_url

from contracts.errors import InvalidRequest

log = logging.getLogger(__name__)

_SYNC_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrade the database at ``url`` (async or sync driver). A schema that is newer than this code stays as it is.

    Blocking. Raises SQLAlchemy's and Alembic's errors.
    """
    if revision == "head" and is_newer(url):
        log.warning("the schema is newer than this version of weft; migrations only add, so it is used as it is")
        return
    command.upgrade(alembic_config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Downgrade the database at ``url`` to ``revision`` (``base``: empty). Blocking."""
    command.downgrade(alembic_config(url), revision)


def current_is_head(url: str) -> bool:
    """Return whether the schema at ``url`` is the newest. Blocking."""
    return _current(url) == ScriptDirectory.from_config(alembic_config(url)).get_current_head()


def is_newer(url: str) -> bool:
    """Return whether the schema at ``url`` is a later version's: this version does not know its revision. Blocking."""
    current = _current(url)
    script = ScriptDirectory.from_config(alembic_config(url))
    return current is not None and current not in {one.revision for one in script.walk_revisions()}


def check_not_older(url: str) -> None:
    """Raise ``InvalidRequest`` when the schema at ``url`` is older than this version. Blocking."""
    if not (current_is_head(url) or is_newer(url)):
        raise InvalidRequest("the database's schema is older than this version; run `weft db upgrade`")


def _current(url: str) -> str | None:
    engine = create_engine(sync_url(url))
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()


def alembic_config(url: str) -> Config:
    """Return Alembic's configuration for ``url``."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    return config


def sync_url(url: str) -> URL:
    """Return ``url`` with the blocking driver of the same database."""
    parsed = make_url(url)
    return parsed.set(drivername=_SYNC_DRIVERS[parsed.get_backend_name()])
