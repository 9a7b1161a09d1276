"""Rows for the dashboard's tests, written beside the running service."""

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cli.administration import on_database
from store.database import Database
from store.settings import Settings


def write_rows(data: Path, work: Callable[[Database], Awaitable[None]]) -> None:
    """Run ``work`` on the database of a data folder, in a thread: Playwright has an event loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(on_database, Settings(data_dir=data), work).result()
