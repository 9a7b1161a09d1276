"""Visits of the dashboard without a browser: logins, and the routes that there are."""

from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi.routing import APIRoute, iter_route_contexts

from api.dashboard.app import create_dashboard
from tenants.keys import create_key
from tenants.rights import KeyRights, Role

SAME = {"sec-fetch-site": "same-origin", "sec-fetch-dest": "document"}
COOKIE = "__Host-weft"


def routes(service: Any) -> Iterator[tuple[str, APIRoute]]:
    """Return the dashboard's routes with their whole paths."""
    for context in iter_route_contexts(create_dashboard(service.services).routes):
        route = context.original_route if hasattr(context, "original_route") else context.route
        assert isinstance(route, APIRoute), context.path
        yield context.path or "", route


async def key_of(service: Any, tenant: Any, role: Role = Role.ADMIN, **rights: Any) -> Any:
    """Make a key of the tenant."""
    async with service.database.write() as transaction:
        asked = KeyRights(role, **rights)
        return await create_key(transaction, tenant=tenant.id, note="", clock=service.clock, rights=asked)


async def log_in(http: httpx.AsyncClient, key: str, **fields: str) -> httpx.Response:
    """Send the form of the login."""
    return await http.post("/ui/login", data={"key": key, **fields}, headers=SAME)


@asynccontextmanager
async def visitor(service: Any, key: str | None = None):
    """Open a client that is logged in with the key."""
    async with httpx.AsyncClient(base_url=service.url, timeout=40, headers=SAME) as http:
        if key is not None:
            answer = await log_in(http, key)
            assert answer.status_code == 303, answer.text
            http.headers["cookie"] = cookie_of(answer)
        yield http


def cookie_of(answer: httpx.Response) -> str:
    """Return the cookie that an answer sets, as a request carries it."""
    return answer.headers["set-cookie"].partition(";")[0]
