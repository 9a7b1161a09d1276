"""Routes that are built before the first request: FastAPI builds a router's at the first request that comes by it."""

from starlette.routing import Router

_NOWHERE = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": [], "query_string": b""}


def build_routes(*routers: Router) -> None:
    """Build every route. A server that calls it before it listens holds nobody up for some tenths of a second later."""
    for router in routers:
        for route in router.routes:
            route.matches(dict(_NOWHERE))
