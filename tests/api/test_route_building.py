"""Routes that are built before the first request comes, once for all applications."""

from typing import Any

import fastapi.routing
import pytest

import api.app
from api.app import list_routers
from api.route_building import build_routes, routes_of
from cli.http_server import ApiServer
from store.settings import Settings
from tests.api.conftest import Service


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the routes that FastAPI has built since."""
    paths: list[str] = []
    build = fastapi.routing.get_dependant

    def noted(*, path: str, **rest: Any) -> Any:
        paths.append(path)
        return build(path=path, **rest)

    monkeypatch.setattr(fastapi.routing, "get_dependant", noted)
    return paths


def test_every_route_is_built_once_for_all_applications(built: list[str]) -> None:
    routes = routes_of(*list_routers())
    first, second = fastapi.FastAPI(routes=list(routes)), fastapi.FastAPI(routes=list(routes))
    assert built == []
    build_routes(first.router)
    assert {"/api/v1/asample", "/api/weft/v1/usage"} <= set(built)
    built.clear()
    build_routes(second.router)
    assert built == []


def test_a_server_has_built_every_route_before_it_listens(
    service: Service, settings: Settings, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.app, "ROUTES", routes_of(*list_routers()))
    app = ApiServer(service.services, settings, service.services.runtime.wakeups).config.app
    assert {"/api/v1/asample", "/api/weft/v1/usage"} <= set(built)
    built.clear()
    build_routes(app.router, app.state.dashboard.router)  # type: ignore[union-attr]
    assert built == []
