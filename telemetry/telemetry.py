"""What the parts of a process are handed to tell what happens in them."""

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
from telemetry.traces import Traces
from telemetry.training import TrainingTelemetry


@dataclass(frozen=True, slots=True)
class Telemetry:
    """One per process."""

    metrics: Metrics
    traces: Traces
    waits: QueueWaits

    @classmethod
    def of(cls, process: str, clock: Clock, traces: Traces | None = None) -> "Telemetry":
        """With a registry of its own, and without traces unless given."""
        metrics, traces = Metrics(process, clock), traces or Traces()
        return cls(metrics, traces, QueueWaits(metrics.registry, traces, clock))

    def accepted(self, operation_id: str, kind: OperationKind, *, started: float) -> None:
        """The request in hand brought an operation, which is recorded now; ``started`` is in seconds since the epoch."""
        work = current_work()
        if work.trace_id is not None:
            self.traces.accepted(operation_id, kind.value, work.trace_id, work.span_id, started=started)

    def finished(self, operation: ReadyOperation, outcome: Result | WeftError) -> None:
        """The operation's row is final."""
        name = outcome.code if isinstance(outcome, WeftError) else "done"
        self.metrics.operation_finished(operation.kind.value, name)

    def training(self, base_model: str) -> TrainingTelemetry:
        """For the trainer of a base model."""
        return TrainingTelemetry(base_model, self.metrics.training, self.waits, self.traces)

    def sampling(self, base_model: str) -> SamplingTelemetry:
        """For those who sample from a base model."""
        return SamplingTelemetry(base_model, self.metrics.sampling, self.waits, self.traces)


def open_telemetry(settings: Settings, process: str, clock: Clock) -> Telemetry:
    """As the settings say. Raises ``ImportError`` when traces are wanted and their libraries are not installed."""
    if settings.otlp_endpoint is None:
        return Telemetry.of(process, clock)
    # Only now: the libraries are an optional extra, and slow to import.
    from telemetry.otlp import OtlpSink

    return Telemetry.of(process, clock, Traces(OtlpSink(settings.otlp_endpoint, process)))
