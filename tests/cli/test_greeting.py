"""The greeting of a service that has started, with its first key."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest

from cli.greeting import greet
from store.database import Database, create_engine
from store.settings import Settings
from tenants.tenant_names import list_tenants

URL = "http://127.0.0.1:8642"


async def test_a_first_start_that_fails_makes_no_key_that_nobody_is_shown(
    tmp_path: Path, tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next start makes it and shows it, and no later one makes another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [
            "-m",
            "cli.main",
            "serve",
            "--data",
            str(tmp_path),
            "--base-model",
            f"cats={tiny_model_dir}",
            "--port",
            "0",
        ]
        environment = {**os.environ, "WEFT_METRICS_PORT": str(taken.getsockname()[1])}
        process = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment)
        async with asyncio.timeout(120):
            assert await process.wait() == 1
    assert "cannot listen" in capfd.readouterr().err
    settings = Settings(data_dir=tmp_path)
    database = Database(create_engine(settings.resolved_database_url(), pool_size=1))
    try:
        async with database.read() as session:
            assert not await list_tenants(session)
        shown = []
        for _ in range(2):
            await greet(database, URL)
            shown.append("export TINKER_API_KEY=tml-" in capfd.readouterr().out)
        assert shown == [True, False]
    finally:
        await database.close()
