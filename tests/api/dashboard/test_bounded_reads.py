"""A page whose statement takes too long says so, on either listener; the API's own reads go on."""

import httpx
import pytest
from sqlalchemy import event

from tests.api.admin.conftest import admin  # noqa: F401 - a fixture
from tests.api.dashboard.visits import SAME, visitor

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n"
TOLD = "the database took longer than 0.05 s"


@pytest.fixture
def slow(service, monkeypatch):
    """Make every statement about projects or operators' audit entries endless, and the pages' limit short."""
    monkeypatch.setattr("api.dashboard.bounded_reads.PAGE_SECONDS", 0.05)
    tables = {"FROM projects", "FROM audit_entries"}

    def endless(_connection, _cursor, statement, parameters, _context, _many):
        return (ENDLESS, ()) if any(table in statement for table in tables) else (statement, parameters)

    for engine in service.engines:
        event.listen(engine, "before_cursor_execute", endless, retval=True)
    yield tables
    for engine in service.engines:
        event.remove(engine, "before_cursor_execute", endless)


async def test_a_page_that_takes_too_long_is_told_and_others_go_on(service, cats, dogs, admin, slow) -> None:  # noqa: F811
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        told = await http.get("/ui/projects")
        assert (told.status_code, TOLD in told.text) == (503, True)
        assert (await other.get("/ui/sessions")).status_code == 200
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:
        begun = await http.post("/ops/login", data={"key": admin.key.secret})
        http.headers["Cookie"] = begun.headers["set-cookie"].partition(";")[0]
        told = await http.get("/ops/audit")
        assert (told.status_code, TOLD in told.text) == (503, True)
    slow.clear()
    async with visitor(service, cats.key) as http:
        assert (await http.get("/ui/projects")).status_code == 200
