"""Metrics, log lines and traces of sampling: samples, tokens, cuts, swaps and attempts."""

import logging
from collections.abc import Sequence
from time import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import SampleOutput
from contracts.sample_report import SampleReport
from telemetry.labels import base_label, replica_label, share_class
from telemetry.queue_waits import QueueWaits
from telemetry.traces import Figures, Traces

log = logging.getLogger(__name__)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_ATTEMPTS = (1, 2, 3, 5, 8, 13, 21)


class SamplingMetrics:
    """Prometheus metric families of sampling. Each has the label ``base``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"weft_{name}", text, ("base", *labels), buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_{name}", text, ("base", *labels), registry=registry)

        self.finished = counter(
            "samples_finished", "Samples that ended; `outcome` is done or an error's code.", "outcome"
        )
        self.cut = counter(
            "samples_cut", "Attempts cut before their end, by reason: gate, version or replica.", "reason"
        )
        self.continued = counter("samples_continued", "Attempts that continued an earlier attempt of their sample.")
        self.drawn = counter("drawn_tokens", "Tokens as they are drawn, of samples that may not have ended.", "share")
        self.tokens = counter("sampled_tokens", "Tokens of finished samples.", "share")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of finished samples' prompts.", "share")
        self.seconds = histogram("sample_seconds", "Seconds of finished samples by phase.", _SECONDS, "phase")
        self.attempts = histogram("sample_attempts", "Dispatches that finished samples took.", _ATTEMPTS)
        self.swap_seconds = histogram(
            "swap_seconds",
            "Seconds without a token of samples in flight that a newer version cut: from the cut to the next token.",
            _SECONDS,
        )


class SamplingTelemetry:
    """Telemetry of one base model's samples in one process."""

    def __init__(self, base_model: str, metrics: SamplingMetrics, waits: QueueWaits, traces: Traces) -> None:
        self._base_model = base_model
        self._label = base_label(base_model)
        self._metrics = metrics
        self._waits = waits
        self._traces = traces
        self._continued = metrics.continued.labels(self._label)
        self._swap_seconds = metrics.swap_seconds.labels(self._label)
        self._drawn: dict[str, Counter] = {}
        """Counters of drawn tokens by share: each is found once, not for every token."""

    def claimed(self, operation: ReadyOperation) -> None:
        """Record the end of the sample's wait in the queue: this process works on it from now on."""
        self._waits.ended(operation, self._base_model)

    def finished(self, operation: ReadyOperation, outcome: tuple[SampleOutput, SampleReport] | WeftError) -> None:
        """Count a sample whose outcome is in the ledger."""
        if isinstance(outcome, WeftError):
            self._metrics.finished.labels(self._label, outcome.code).inc()
            log.info("sample failed code=%s", outcome.code)
            return
        output, report = outcome
        share, made = share_class(operation.share), sum(len(sequence.tokens) for sequence in output.sequences)
        self._metrics.finished.labels(self._label, "done").inc()
        self._metrics.tokens.labels(self._label, share).inc(made)
        self._metrics.prompt_tokens.labels(self._label, share).inc(operation.tokens)
        self._metrics.seconds.labels(self._label, "queue").observe(report.queue_seconds)
        self._metrics.seconds.labels(self._label, "decode").observe(report.decode_seconds)
        self._metrics.attempts.labels(self._label).observe(report.attempts)
        log.debug("sample done tokens=%d attempts=%d", made, report.attempts)

    def cut(self, reason: str) -> None:
        """Count an attempt that was cut. ``reason``: ``gate``, ``version`` (a newer one came) or ``replica`` (it failed)."""
        self._metrics.cut.labels(self._label, reason).inc()

    def drawn(self, operation: ReadyOperation, tokens: int) -> None:
        """Count tokens that have just come from a replica."""
        share = share_class(operation.share)
        drawn = self._drawn.get(share)
        if drawn is None:
            drawn = self._drawn[share] = self._metrics.drawn.labels(self._label, share)
        drawn.inc(tokens)

    def continued(self) -> None:
        """Count an attempt that continues an earlier attempt of the same sample."""
        self._continued.inc()

    def swapped(self, seconds: float) -> None:
        """Record the seconds between a version's cut and the sample's first token after it."""
        self._swap_seconds.observe(seconds)

    def attempt_done(self, operation: ReadyOperation, *, replica: str, number: int, seconds: float) -> None:
        """Trace an attempt that has ended, with or without a failure. ``number`` counts the sample's attempts from 1."""
        if self._traces.is_on:
            figures: Figures = {
                "replica": replica_label(replica, self._base_model),
                "attempt": number,
                "base": self._label,
            }
            self._traces.worked(operation, "sample attempt", started=time() - seconds, figures=figures)
