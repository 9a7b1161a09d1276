"""Headers that bound what a browser does with an answer of this origin, pages and API alike."""

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "font-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types default",
    )
)
_API_POLICY = "default-src 'none'; frame-ancestors 'none'; sandbox"
REPORTS = "/policy-reports"
"""Path, below the pages, that browsers report to."""
_EVERYWHERE = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=(), payment=(), usb=()"),
    (b"x-frame-options", b"DENY"),
    # Keys and secrets are shown once, and caches on the way do not know that X-API-Key tells tenants apart.
    (b"cache-control", b"no-store"),
)
_HTTPS = (b"strict-transport-security", b"max-age=31536000")


def is_under(path: str, prefix: str) -> bool:
    """Return whether the path is the prefix or below it."""
    return path == prefix or path.startswith(prefix + "/")


class SecurityHeaders:
    """ASGI middleware that adds the headers. Answers under ``pages`` may run the origin's own scripts, others none.

    Browsers report what the policy of pages keeps from them to the first of ``pages``.
    """

    def __init__(self, app: ASGIApp, *, pages: Sequence[str]) -> None:
        self._app = app
        self._pages = tuple(pages)
        self._page_policy = f"{_PAGE_POLICY}; report-uri {self._pages[0]}{REPORTS}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and add the headers that its answer lacks."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_page = any(is_under(scope["path"], prefix) for prefix in self._pages)
        policy = self._page_policy if is_page else _API_POLICY
        added = [(b"content-security-policy", policy.encode()), *_EVERYWHERE]
        if scope.get("scheme") == "https":
            added.append(_HTTPS)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                names = {name.lower() for name, _ in own}
                message["headers"] = own + [one for one in added if one[0] not in names]
            await send(message)

        await self._app(scope, receive, send_with_headers)
