"""Spans of what happened, made when it is over; they go to a sink, or nowhere.

Only an operation's trace id crosses the queue: the span of its acceptance has an id made from the operation's own, so every
process knows what its spans belong under.
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
    """Which span: 32 and 16 hexadecimal digits."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that is over. Times are seconds since the epoch; ``links`` name spans of other traces."""

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
    """Where spans go; neither method waits for the network, except ``close`` for a few seconds."""

    def put(self, span: Span) -> None:
        """Take one; it may be dropped when there are too many."""
        ...

    def close(self) -> None:
        """Send what is left. Blocking."""
        ...


class Traces:
    """Makes spans for ``sink``; without one every method does nothing."""

    def __init__(self, sink: SpanSink | None = None) -> None:
        self._sink = sink

    @property
    def is_on(self) -> bool:
        """Whether anybody wants spans."""
        return self._sink is not None

    def request_done(
        self, ids: SpanIds, parent: SpanIds | None, *, route: str, method: str, status: int, seconds: float
    ) -> None:
        """An HTTP request was answered."""
        if self._sink is not None:
            now = time()
            figures: Figures = {"http.route": route, "http.request.method": method, "http.response.status_code": status}
            name, failed = f"{method} {route}", status >= 500
            self._sink.put(Span(name, ids, parent, now - seconds, now, figures, is_request=True, has_failed=failed))

    def accepted(self, operation_id: str, kind: str, trace_id: str, parent: str | None, *, started: float) -> None:
        """An operation was recorded; ``parent`` is the request's span."""
        if self._sink is not None:
            ids = SpanIds(trace_id, span_id_of(operation_id))
            above = None if parent is None else SpanIds(trace_id, parent)
            self._sink.put(Span(f"accept {kind}", ids, above, started, time(), {"operation": operation_id}))

    def waited(self, operation: ReadyOperation) -> None:
        """The operation's work begins now."""
        if operation.accepted_at is not None:
            self.worked(operation, f"wait {operation.kind}", started=operation.accepted_at.timestamp(), figures={})

    def worked(self, operation: ReadyOperation, name: str, *, started: float, figures: Figures) -> None:
        """Something for one operation began at ``started`` and has just ended."""
        above = _ids_of(operation)
        if self._sink is not None and above is not None:
            ids = SpanIds(above.trace_id, new_span_id())
            figures = {**figures, "operation": operation.id}
            self._sink.put(Span(name, ids, above, started, max(time(), started), figures))

    def pass_done(
        self, operations: Sequence[ReadyOperation], *, seconds: float, figures: Figures, name: str = "pass"
    ) -> None:
        """Something for several operations at once has just ended: a trace of its own that links to theirs."""
        if self._sink is not None:
            links = [ids for operation in operations if (ids := _ids_of(operation)) is not None]
            ids = SpanIds(new_trace_id(), new_span_id())
            self._sink.put(Span(name, ids, None, time() - seconds, time(), figures, links))

    def close(self) -> None:
        """Send what is left. Blocking."""
        if self._sink is not None:
            self._sink.close()


def new_span_id() -> str:
    """A random one."""
    return f"{getrandbits(64) or 1:016x}"


def span_id_of(operation_id: str) -> str:
    """The id of the span of an operation's acceptance."""
    return operation_id.replace("-", "")[:16]


def _ids_of(operation: ReadyOperation) -> SpanIds | None:
    return None if operation.trace_id is None else SpanIds(operation.trace_id, span_id_of(operation.id))
