"""A page that fails in a way that nobody foresaw is an error page that tells nothing of it, and other tenants' go on."""

import httpx
import pytest

from api.dashboard.operators import housekeeping
from api.dashboard.tenant import projects
from tests.api.admin.conftest import admin  # noqa: F401 - a fixture
from tests.api.dashboard.visits import SAME, cookie_of, visitor


async def _fail(*_arguments: object) -> None:
    raise KeyError("a secret of the inside")


async def test_a_page_that_fails_is_told_as_a_page(service, cats, dogs, monkeypatch: pytest.MonkeyPatch) -> None:
    async with visitor(service, cats.key) as http, visitor(service, dogs.key) as other:
        with monkeypatch.context() as patched:
            patched.setattr(projects, "list_own_projects", _fail)
            answer = await http.get("/ui/projects")
            part = await http.get("/ui/projects", headers={"hx-request": "true"})
            assert (await other.get("/ui/runs")).status_code == 200
        assert (answer.status_code, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
        assert "Something went wrong" in answer.text
        assert "Back to the overview" in answer.text
        assert (part.status_code, "<!doctype" in part.text) == (500, False)
        assert "secret" not in answer.text + part.text
        assert (await http.get("/ui/projects")).status_code == 200


async def test_an_operators_page_that_fails_is_told_as_a_page(admin, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    async with httpx.AsyncClient(base_url=admin.url, timeout=40, headers=SAME) as http:
        http.headers["cookie"] = cookie_of(await http.post("/ops/login", data={"key": admin.key.secret}))
        with monkeypatch.context() as patched:
            patched.setattr(housekeeping, "show_housekeeping", _fail)
            answer = await http.get("/ops/housekeeping")
        assert (answer.status_code, "Something went wrong" in answer.text) == (500, True)
        assert "secret" not in answer.text
        assert (await http.get("/ops/housekeeping")).status_code == 200
