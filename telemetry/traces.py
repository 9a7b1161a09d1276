"""Traces: for each ended piece of work a span is made and goes to a sink, if there is one.

The operation's row carries only the trace's id. The id of the acceptance span is derived from the operation's id,
so every process knows the parent of its spans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits
from time import time
from typing import Protocol

from contracts.ledger_records import ReadyOperation
from telemetry.context import new_trace_id

Figures = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class SpanIds:
    """Ids of a span: ``trace_id`` has 32 hexadecimal digits, ``span_id`` 16."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """A finished piece of work. Times are seconds since the epoch. ``links`` name spans of other traces."""

    name: str
    ids: SpanIds
    parent: SpanIds | None
    started: float
    ended: float
    figures: Figures
    links: Sequence[SpanIds] = ()
    is_request: bool = False
    has_failed: bool = False


class SpanSink(Protocol):
    """Destination of spans. ``put`` never waits for the network; ``close`` may, for a few seconds."""

    def put(self, span: Span) -> None:
        """Accept a span. A full sink may drop it."""
        ...

    def close(self) -> None:
        """Send the remaining spans. Blocking."""
        ...


class Traces:
    """Makes spans for ``sink``. Without a sink every method does nothing."""

    def __init__(self, sink: SpanSink | None = None) -> None:
        self._sink = sink

    @property
    def is_on(self) -> bool:
        """True when there is a sink."""
        return self._sink is not None

    def request_done(
        self, ids: SpanIds, parent: SpanIds | None, *, route: str, method: str, status: int, seconds: float
    ) -> None:
        """Make the span of an HTTP request that was answered just now."""
        if self._sink is not None:
            now = time()
            figures: Figures = {"http.route": route, "http.request.method": method, "http.response.status_code": status}
            name, failed = f"{method} {route}", status >= 500
            self._sink.put(Span(name, ids, parent, now - seconds, now, figures, is_request=True, has_failed=failed))

    def accepted(self, operation_id: str, kind: str, trace_id: str, parent: str | None, *, started: float) -> None:
        """Make the span of an operation's acceptance; ``parent`` is the request's span id."""
        if self._sink is not None:
            ids = SpanIds(trace_id, span_id_of(operation_id))
            above = None if parent is None else SpanIds(trace_id, parent)
            self._sink.put(Span(f"accept {kind}", ids, above, started, time(), {"operation": operation_id}))

    def waited(self, operation: ReadyOperation) -> None:
        """Make the span of an operation's wait, from its acceptance until now."""
        if operation.accepted_at is not None:
            self.worked(operation, f"wait {operation.kind}", started=operation.accepted_at.timestamp(), figures={})

    def worked(self, operation: ReadyOperation, name: str, *, started: float, figures: Figures) -> None:
        """Make the span of work for one operation, from ``started`` until now."""
        above = _ids_of(operation)
        if self._sink is not None and above is not None:
            ids = SpanIds(above.trace_id, new_span_id())
            figures = {**figures, "operation": operation.id}
            self._sink.put(Span(name, ids, above, started, max(time(), started), figures))

    def pass_done(
        self, operations: Sequence[ReadyOperation], *, seconds: float, figures: Figures, name: str = "pass"
    ) -> None:
        """Make the span of work for several operations that ended just now, in a new trace that links to the operations."""
        if self._sink is not None:
            links = [ids for operation in operations if (ids := _ids_of(operation)) is not None]
            ids = SpanIds(new_trace_id(), new_span_id())
            self._sink.put(Span(name, ids, None, time() - seconds, time(), figures, links))

    def close(self) -> None:
        """Send the remaining spans. Blocking."""
        if self._sink is not None:
            self._sink.close()


def new_span_id() -> str:
    """Return a random span id."""
    return f"{getrandbits(64) or 1:016x}"


def span_id_of(operation_id: str) -> str:
    """Return the id of the operation's acceptance span."""
    return operation_id.replace("-", "")[:16]


def _ids_of(operation: ReadyOperation) -> SpanIds | None:
    return None if operation.trace_id is None else SpanIds(operation.trace_id, span_id_of(operation.id))
