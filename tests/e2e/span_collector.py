"""An OpenTelemetry collector that only remembers: a real HTTP server that takes OTLP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class SpanCollector:
    """Spans that have arrived."""

    url: str
    spans: list[Span] = field(default_factory=list)

    def of_trace(self, trace_id: str) -> dict[str, Span]:
        """Spans of a trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """Listens on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    collector.spans += scope.spans
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = SpanCollector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield collector
    server.shutdown()
    server.server_close()
    thread.join()
