"""Telemetry of a process: metrics, traces and queue waits in one record, handed to its parts."""

from dataclasses import dataclass

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import OperationKind, Result
from store.clock import Clock
from store.settings import Settings
from telemetry.context import current_work
from telemetry.metrics import Metrics
from telemetry.queue_waits import QueueWaits
from telemetry.sampling import SamplingTelemetry
from telemetry.security import SampledRecords
from telemetry.traces import Traces
from telemetry.training import TrainingTelemetry


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Metrics, traces, queue waits and sampled security events of one process."""

    metrics: Metrics
    traces: Traces
    waits: QueueWaits
    refusals: SampledRecords
    """Security events that anybody can cause."""

    @classmethod
    def of(cls, process: str, clock: Clock, traces: Traces | None = None) -> "Telemetry":
        """Make the telemetry with its own registry; without ``traces`` no spans are made."""
        metrics, traces = Metrics(process, clock), traces or Traces()
        return cls(metrics, traces, QueueWaits(metrics.registry, traces, clock), SampledRecords())

    def accepted(self, operation_id: str, kind: OperationKind, *, started: float) -> None:
        """Make the span of an operation's acceptance under the current request. ``started``: seconds since the epoch."""
        work = current_work()
        if work.trace_id is not None:
            self.traces.accepted(operation_id, kind.value, work.trace_id, work.span_id, started=started)

    def finished(self, operation: ReadyOperation, outcome: Result | WeftError) -> None:
        """Count the operation, whose row became final."""
        name = outcome.code if isinstance(outcome, WeftError) else "done"
        self.metrics.operation_finished(operation.kind.value, name)

    def training(self, base_model: str) -> TrainingTelemetry:
        """Return the telemetry of a base model's trainer."""
        return TrainingTelemetry(base_model, self.metrics.training, self.waits, self.traces)

    def sampling(self, base_model: str) -> SamplingTelemetry:
        """Return the telemetry of a base model's samplers."""
        return SamplingTelemetry(base_model, self.metrics.sampling, self.waits, self.traces)


def open_telemetry(settings: Settings, process: str, clock: Clock) -> Telemetry:
    """Make the telemetry that the settings ask for.

    Raises ``ImportError`` when ``otlp_endpoint`` is set and the libraries for traces are not installed.
    """
    if settings.otlp_endpoint is None:
        return Telemetry.of(process, clock)
    # Imported late: the libraries are an optional extra and slow to import.
    from telemetry.otlp import OtlpSink

    return Telemetry.of(process, clock, Traces(OtlpSink(settings.otlp_endpoint, process)))
