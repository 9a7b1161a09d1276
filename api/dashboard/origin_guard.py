"""Refusal of requests that other sites make a browser send: the dashboard's defence against forged requests."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_REFUSAL = (
    "This request did not come from a page of this service, so it was refused (forbidden).\n"
    "Open the page anew and send the form from there. Behind a proxy, let it keep the Host header.\n"
)


def is_own_request(headers: Headers) -> bool:
    """Return whether a browser says that a page of the same origin sent the request.

    ``Sec-Fetch-Site`` decides. Browsers leave it out over plain http off loopback; then ``Origin`` must be the ``Host``.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin, host = headers.get("origin"), headers.get("host")
    try:
        return bool(origin and host) and urlsplit(origin or "").netloc.lower() == (host or "").lower()
    except ValueError:
        # No browser sends such an origin.
        return False


class OriginGuard:
    """ASGI middleware that lets no request change anything unless it comes from a page of the same origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer 403 in its place."""
        if scope["type"] == "http" and scope["method"] not in _SAFE and not is_own_request(Headers(scope=scope)):
            await PlainTextResponse(_REFUSAL, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)
