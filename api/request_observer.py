"""Middleware that gives each request a trace id, and reports its status and duration to metrics and traces."""

from collections.abc import Sequence
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.rate_headers import begin_noting, noted_headers
from telemetry.context import TraceParent, begin_work, new_trace_id, parse_traceparent
from telemetry.telemetry import Telemetry
from telemetry.traces import SpanIds, new_span_id

UNKNOWN_ROUTE = "unmatched"
"""Metric label of a path without a route. The path itself is no label: clients could make up any number of them."""


class RequestObserver:
    """ASGI middleware. The answer's ``x-trace-id`` comes from the client's ``traceparent`` if it sent a valid one."""

    def __init__(self, app: ASGIApp, *, telemetry: Telemetry, prefixes: Sequence[str]) -> None:
        """``prefixes`` are the routers' prefixes, which a route's own template lacks."""
        self._app = app
        self._http = telemetry.metrics.http
        self._traces = telemetry.traces
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and report its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = perf_counter()
        caller = _caller(scope)
        trace_id = new_trace_id() if caller is None else caller.trace_id
        ids = SpanIds(trace_id, new_span_id()) if self._traces.is_on else None
        begin_work(trace_id, None if ids is None else ids.span_id)
        begin_noting()
        status = 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = message.get("headers", ())
                message["headers"] = [*own, (b"x-trace-id", trace_id.encode()), *noted_headers(scope["path"], own)]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            route = self._route(scope)
            self._http.answered(route, scope["method"], status, started=started)
            if ids is not None:
                above = None if caller is None else SpanIds(caller.trace_id, caller.span_id)
                seconds = perf_counter() - started
                self._traces.request_done(
                    ids, above, route=route, method=scope["method"], status=status, seconds=seconds
                )

    def _route(self, scope: Scope) -> str:
        template: str | None = getattr(scope.get("route"), "path", None)
        if template is None:
            return UNKNOWN_ROUTE
        for prefix in self._prefixes:
            if scope["path"] == prefix or scope["path"].startswith(prefix + "/"):
                return template if template.startswith(prefix + "/") else prefix + template
        return template


def _caller(scope: Scope) -> TraceParent | None:
    for name, value in scope["headers"]:
        if name == b"traceparent":
            return parse_traceparent(value)
    return None
