"""The service's database for commands that work on it directly."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.engine import make_url

from cli.operator_log import noted_command
from migrations.upgrade import check_not_older, upgrade
from store.database import Database, create_engine
from store.private_folder import open_private_folder
from store.settings import Settings

T = TypeVar("T")


def on_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the settings' database and return its result. Raises what ``work`` raises.

    An SQLite schema is brought up to date first. For an old PostgreSQL schema, which ``weft db upgrade`` brings up to
    date, it raises ``InvalidRequest``.
    """
    with noted_command(settings):
        return _on_current_database(settings, work)


def _on_current_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    checked_database(settings)

    async def connected() -> T:
        database = Database(create_engine(settings.resolved_database_url()))
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(connected())


def checked_database(settings: Settings) -> None:
    """Make the data folder, and bring an SQLite schema up to date. Blocking.

    Raises ``InvalidRequest`` for an old PostgreSQL schema, which ``weft db upgrade`` brings up to date.
    """
    open_private_folder(settings.data_dir)
    url = settings.resolved_database_url()
    if make_url(url).get_backend_name() == "sqlite":
        upgrade(url)
    else:
        check_not_older(url)
