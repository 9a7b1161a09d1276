"""The admin API over HTTP, as commands call it: how long they wait."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from typer.testing import CliRunner

from cli.main import app


def test_a_run_of_housekeeping_is_waited_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float | None] = {}

    async def answer(request: httpx2.Request) -> httpx2.Response:
        limits[request.method] = request.extensions["timeout"]["read"]
        return httpx2.Response(200, json={"items": [], "next": None})

    @asynccontextmanager
    async def over_http(_door: object) -> AsyncIterator[httpx2.AsyncClient]:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(base_url="http://admin", transport=transport) as http:
            yield http

    monkeypatch.setattr("cli.admin_client._over_http", over_http)
    environment = {"WEFT_ADMIN_URL": "http://admin", "WEFT_ADMIN_KEY": "tml-key"}
    for command in ("run", "status"):
        ended = CliRunner().invoke(app, ["housekeeping", command], env=environment)
        assert ended.exit_code == 0, ended.output
    assert limits == {"POST": None, "GET": 60.0}
