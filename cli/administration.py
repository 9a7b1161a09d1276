"""The service's database for commands that work on it directly."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import typer
from sqlalchemy.engine import make_url

from cli.operator_log import noted_command
from migrations.upgrade import check_not_older, upgrade
from store.database import Database, create_engine
from store.private_folder import open_private_folder
from store.settings import Settings

T = TypeVar("T")


def check_is_made(settings: Settings, *, may_begin: bool = False) -> None:
    """Exit with 2 and a message where the service's SQLite file is missing: a mistyped folder gets no database.

    ``may_begin``: the command may make it, where the settings name the folder or the database.
    """
    if may_begin and not settings.model_fields_set.isdisjoint({"data_dir", "database_url"}):
        return
    url = make_url(settings.resolved_database_url())
    if url.get_backend_name() != "sqlite" or Path(url.database or "").is_file():
        return
    if settings.database_url is None:
        told = f"no database in {settings.data_dir.absolute()}: pass --data, or set WEFT_DATA_DIR"
    else:
        told = f"no database at {Path(url.database or '').absolute()}: set WEFT_DATABASE_URL to the service's"
    typer.echo(f"weft: {told}; `weft serve` and `weft db upgrade` make one", err=True)
    raise typer.Exit(2)


def on_database(settings: Settings, work: Callable[[Database], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` on the settings' database and return its result. Raises what ``work`` raises. Exit with 2 where there is none.

    An SQLite schema is brought up to date first. For an old PostgreSQL schema, which ``weft db upgrade`` brings up to
    date, it raises ``InvalidRequest``.
    """
    check_is_made(settings)
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
    """Make the data folder, and an SQLite database or bring its schema up to date. Blocking.

    Raises ``InvalidRequest`` for an old PostgreSQL schema, which ``weft db upgrade`` brings up to date.
    """
    open_private_folder(settings.data_dir)
    url = settings.resolved_database_url()
    if make_url(url).get_backend_name() == "sqlite":
        upgrade(url)
    else:
        check_not_older(url)
