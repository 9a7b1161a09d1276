"""Routes that are built once, before the first request: FastAPI builds a router's at the first request that comes by it."""

from fastapi import APIRouter
from starlette.routing import BaseRoute, Router

_NOWHERE = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": [], "query_string": b""}


def routes_of(*routers: tuple[str, APIRouter]) -> tuple[BaseRoute, ...]:
    """Return the routes of routers, each under its prefix. Applications that share them share what FastAPI builds."""
    together = APIRouter()
    for prefix, router in routers:
        together.include_router(router, prefix=prefix)
    return tuple(together.routes)


def build_routes(*routers: Router) -> None:
    """Build every route. A server that calls it before it listens holds nobody up for some tenths of a second later."""
    for router in routers:
        for route in router.routes:
            route.matches(dict(_NOWHERE))
