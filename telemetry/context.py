"""Work context: ids of the work that the current task does, for logs and traces.

The trace id travels between processes in the operation's row.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from random import getrandbits

from contracts.ledger_records import ReadyOperation

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-|$)")


@dataclass(frozen=True, slots=True)
class WorkContext:
    """Ids of the current work; None where there is none.

    ``trace_id`` has 32 hexadecimal digits. ``span_id`` has 16 and names the current request's span; it is set only while
    traces are on. ``key_id`` is the number of the API key that the request carries.
    """

    trace_id: str | None = None
    tenant: str | None = None
    operation: str | None = None
    span_id: str | None = None
    key_id: int | None = None


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Content of the W3C header ``traceparent``: the caller's trace, and the span that is the parent of the next one."""

    trace_id: str
    span_id: str


_NONE = WorkContext()
_current: ContextVar[WorkContext] = ContextVar("weft_work", default=_NONE)


def current_work() -> WorkContext:
    """Return the running task's context."""
    return _current.get()


def begin_work(trace_id: str, span_id: str | None = None) -> None:
    """Start a new context in the running task. Call it once, at the edge, in a task of its own."""
    _current.set(WorkContext(trace_id=trace_id, span_id=span_id))


def note_caller(tenant: str, key_id: int) -> None:
    """Add the tenant who sent the request, and the key that it carries, to the running task's context."""
    _current.set(replace(_current.get(), tenant=tenant, key_id=key_id))


@contextmanager
def working_on(operation: ReadyOperation) -> Iterator[None]:
    """Attribute everything logged inside to the operation."""
    token = _current.set(WorkContext(operation.trace_id, operation.tenant, operation.id))
    try:
        yield
    finally:
        _current.reset(token)


def parse_traceparent(header: bytes) -> TraceParent | None:
    """Return the header's ids, or None for an invalid header: a new trace then begins here."""
    found = _TRACEPARENT.match(header)
    return None if found is None else TraceParent(found[1].decode(), found[2].decode())


def new_trace_id() -> str:
    """Return a random trace id. It is no secret."""
    return f"{getrandbits(128) or 1:032x}"
