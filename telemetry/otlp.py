"""Export of spans to an OpenTelemetry collector over HTTP. Imported only when ``otlp_endpoint`` is set."""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from telemetry.traces import Span, SpanIds

_NANOSECONDS = 1e9
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_EXPORT_SECONDS = 5.0


class OtlpSink:
    """A ``SpanSink`` that sends batches from its own thread. When a slow collector fills the queue, spans are dropped."""

    def __init__(self, endpoint: str, process: str) -> None:
        """``endpoint`` is the collector's base URL, without ``/v1/traces``; ``process`` names this service instance."""
        self._resource = Resource.create({"service.name": "weft", "service.instance.id": process})
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_EXPORT_SECONDS)
        self._processor = BatchSpanProcessor(exporter)

    def put(self, span: Span) -> None:
        """Queue the span to be sent."""
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=_context(span.ids),
                parent=None if span.parent is None else _context(span.parent),
                resource=self._resource,
                attributes=dict(span.figures),
                links=[Link(_context(ids)) for ids in span.links],
                kind=SpanKind.SERVER if span.is_request else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR if span.has_failed else StatusCode.UNSET),
                start_time=int(span.started * _NANOSECONDS),
                end_time=int(span.ended * _NANOSECONDS),
            )
        )

    def close(self) -> None:
        """Send the queued spans. Blocking."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(ids: SpanIds) -> SpanContext:
    return SpanContext(int(ids.trace_id, 16), int(ids.span_id, 16), is_remote=False, trace_flags=_SAMPLED)
