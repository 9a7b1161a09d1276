"""The time limit of what pages read: a dashboard is no neighbour that holds training and sampling up."""

from starlette.types import ASGIApp, Receive, Scope, Send

from store.statement_limit import statements_within

PAGE_SECONDS = 2.0
"""Longest time of one statement of a page."""
_READS = frozenset({"GET", "HEAD"})


class BoundedReads:
    """ASGI middleware that bounds each statement of a page. A form's work is not bounded: it may clean up a lot."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["method"] not in _READS:
            await self._app(scope, receive, send)
            return
        with statements_within(PAGE_SECONDS):
            await self._app(scope, receive, send)
