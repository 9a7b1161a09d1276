"""What the current task works on, for logs and traces: it crosses the queue with the operation's row."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from random import getrandbits

from contracts.ledger_records import ReadyOperation

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-|$)")


@dataclass(frozen=True, slots=True)
class WorkContext:
    """Ids of the work in hand; None where there is none.

    ``trace_id`` is 32 hexadecimal digits; ``span_id``, 16, is that of the request in hand where traces are wanted.
    """

    trace_id: str | None = None
    tenant: str | None = None
    operation: str | None = None
    span_id: str | None = None


@dataclass(frozen=True, slots=True)
class TraceParent:
    """What the W3C header ``traceparent`` says: whose trace goes on, and after which of its spans."""

    trace_id: str
    span_id: str


_NONE = WorkContext()
_current: ContextVar[WorkContext] = ContextVar("weft_work", default=_NONE)


def current_work() -> WorkContext:
    """Of the running task."""
    return _current.get()


def begin_work(trace_id: str, span_id: str | None = None) -> None:
    """The running task begins something new; call it once at the edge, in a task of its own."""
    _current.set(WorkContext(trace_id=trace_id, span_id=span_id))


def note_tenant(tenant: str) -> None:
    """The work is the tenant's, from now to the end of the task."""
    work = _current.get()
    _current.set(WorkContext(work.trace_id, tenant, work.operation, work.span_id))


@contextmanager
def working_on(operation: ReadyOperation) -> Iterator[None]:
    """What is logged meanwhile is about the operation."""
    token = _current.set(WorkContext(operation.trace_id, operation.tenant, operation.id))
    try:
        yield
    finally:
        _current.reset(token)


def parse_traceparent(header: bytes) -> TraceParent | None:
    """The header's ids, None for one that is not as the standard says: the trace then begins here."""
    found = _TRACEPARENT.match(header)
    return None if found is None else TraceParent(found[1].decode(), found[2].decode())


def new_trace_id() -> str:
    """A random one: it names, it guards nothing."""
    return f"{getrandbits(128) or 1:032x}"
