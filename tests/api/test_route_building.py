"""Routes that are built before the first request comes."""

from typing import Any

import fastapi.routing
import pytest

from api.app import create_app
from api.route_building import build_routes
from cli.http_server import ApiServer
from store.settings import Settings
from tests.api.conftest import Service


def test_a_server_has_built_every_route_before_it_listens(
    service: Service, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = fastapi.routing.get_dependant

    def noted(*, path: str, **rest: Any) -> Any:
        built.append(path)
        return build(path=path, **rest)

    monkeypatch.setattr(fastapi.routing, "get_dependant", noted)
    late = create_app(service.services)
    assert built == []
    build_routes(late.router, late.state.dashboard.router)
    assert {"/api/v1/asample", "/api/weft/v1/usage", "/ui/runs"} <= set(built)
    app = ApiServer(service.services, settings, service.services.runtime.wakeups).config.app
    built.clear()
    build_routes(app.router, app.state.dashboard.router)  # type: ignore[union-attr]
    assert built == []
