"""Throw-away PostgreSQL databases for tests and benchmarks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psycopg
from sqlalchemy import make_url

DEFAULT_SERVER = os.environ.get("WEFT_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/postgres")
"""URL of the PostgreSQL server, as psycopg reads it."""


@contextmanager
def throwaway_database(server: str = DEFAULT_SERVER, *, template: str | None = None) -> Iterator[str]:
    """Create a database on the server, yield its async URL, and drop it afterwards.

    It is empty, or a copy of the database at the URL ``template``, to which nobody may be connected.
    """
    name = f"weft_{uuid4().hex}"
    url = make_url(server).set(drivername="postgresql+asyncpg", database=name)
    with psycopg.connect(server, autocommit=True, connect_timeout=60) as connection:
        source = f' TEMPLATE "{make_url(template).database}"' if template else ""
        connection.execute(f'CREATE DATABASE "{name}"{source}'.encode())
        try:
            yield url.render_as_string(hide_password=False)
        finally:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
