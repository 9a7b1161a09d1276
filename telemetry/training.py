"""Metrics, traces and log lines of a trainer: its passes, optimizer steps, snapshots, and adapters paged in and out."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, time

from prometheus_client import CollectorRegistry, Counter, Histogram

from contracts.errors import WeftError
from contracts.ledger_records import ReadyOperation
from contracts.operations import ForwardBackwardOutput, OperationKind, Result
from contracts.pass_report import PassReport
from telemetry.context import working_on
from telemetry.labels import base_label, share_class
from telemetry.queue_waits import QueueWaits
from telemetry.traces import Figures, Traces
from telemetry.training_counts import TrainingCounts

log = logging.getLogger(__name__)

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PADDING = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
KLS = (1e-6, 1e-5, 1e-4, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75)
RATIOS = (1.001, 1.01, 1.1, 1.5, 2.0, 5.0, 10.0, 100.0, 1e4)
SUMMARY_SECONDS = 60.0
"""Time between two log lines with the sums since the last one. Each pass has its own line, on level debug."""
_TRAINED = frozenset({OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD})


class TrainingMetrics:
    """Metric families of training; each has the label ``base``, the base model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"weft_{name}", text, ("base",), buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"weft_{name}", text, ("base", *labels), registry=registry)

        self.pass_seconds = histogram(
            "pass_seconds", "Seconds of a fused pass. Its count is the number of passes.", SECONDS
        )
        self.pass_part_seconds = counter("pass_part_seconds", "Seconds of passes by part.", "part")
        self.pass_sequences = histogram("pass_sequences", "Sequences of a pass.", COUNTS)
        self.pass_tokens = histogram("pass_tokens", "Tokens of a pass, without padding.", TOKENS)
        self.pass_padding = histogram("pass_padding_ratio", "Padding among all positions of a pass.", PADDING)
        self.pass_adapters = histogram("pass_adapters", "Adapters in a pass.", COUNTS)
        self.pass_tenants = histogram("pass_tenants", "Tenants in a pass.", COUNTS)
        self.steps = counter("optimizer_steps", "Optimizer steps of adapters.")
        self.step_seconds = histogram("optimizer_seconds", "Seconds of a fused step of several adapters.", SECONDS)
        self.tokens = counter("trained_tokens", "Tokens of finished passes.", "share", "kind")
        self.sampling_kl = histogram(
            "policy_sampling_kl", "KL divergence of trained from sampling weights, by operation of a policy loss.", KLS
        )
        self.ratio_outside = histogram(
            "policy_ratio_outside", "Share of probability ratios outside 0.9 to 1.1, by operation.", SHARES
        )
        self.ratio_max = histogram("policy_ratio_max", "Largest probability ratio, by operation.", RATIOS)
        self.paged = counter("adapters_paged", "Adapters that came into memory or left it.", "direction")
        self.snapshots = counter("snapshots_written", "Training states written durably.")
        self.snapshot_failures = counter("snapshot_failures", "Snapshots that could not be written.")
        self.snapshot_seconds = histogram(
            "snapshot_seconds", "Seconds from a snapshot's start until it is recorded.", SECONDS
        )
        self.replayed = histogram("replayed_operations", "Operations replayed to restore an adapter.", (0, *COUNTS))
        self.restore_seconds = histogram(
            "restore_seconds", "Seconds of restoring an adapter, replay included.", SECONDS
        )
        self.self_tests = counter("self_tests", "Self-tests of the device after unforeseen failures.", "outcome")
        self.device_failures = counter(
            "device_failures", "Trainers that ended because their device failed or made no progress."
        )
        self.publish_seconds = histogram(
            "publish_seconds", "Seconds from a written version to live samplers following it, loads included.", SECONDS
        )


class TrainingTelemetry:
    """Events of one base model's trainer. Each event is recorded here once and goes to metrics, traces, log and ``counts``."""

    def __init__(self, base_model: str, metrics: TrainingMetrics, waits: QueueWaits, traces: Traces) -> None:
        self._base_model = base_model
        self._label = base = base_label(base_model)
        self._metrics = metrics
        self._waits = waits
        self._traces = traces
        self.counts = TrainingCounts()
        self._summed_up = TrainingCounts()
        self._summed_up_at = monotonic()
        self._pass_histograms = [
            family.labels(base)
            for family in (
                metrics.pass_seconds,
                metrics.pass_sequences,
                metrics.pass_tokens,
                metrics.pass_padding,
                metrics.pass_adapters,
                metrics.pass_tenants,
            )
        ]
        self._part_seconds = [metrics.pass_part_seconds.labels(base, part) for part in ("base", "low_rank", "loss")]
        self._paged_in = metrics.paged.labels(base, "in")
        self._paged_out = metrics.paged.labels(base, "out")
        self._steps = metrics.steps.labels(base)
        self._policy = {
            "sampling_kl:mean": metrics.sampling_kl.labels(base),
            "ratio_outside:mean": metrics.ratio_outside.labels(base),
            "ratio:max": metrics.ratio_max.labels(base),
        }
        self._snapshots = metrics.snapshots.labels(base)
        self._snapshot_failures = metrics.snapshot_failures.labels(base)

    def claimed(self, operations: Sequence[ReadyOperation]) -> None:
        """Record that work on the operations begins, which ends their wait in the queue. Replays have waited before."""
        for operation in operations:
            if not operation.is_replay:
                self._waits.ended(operation, self._base_model)

    def pass_done(self, report: PassReport, *, tenants: int, operations: Sequence[ReadyOperation]) -> None:
        """Record a pass, or a part of one, that has just ended and computed ``operations`` of ``tenants`` tenants."""
        self.counts.add_pass(report, tenants=tenants)
        self._log_pass(report, tenants)
        values = (report.seconds, report.sequences, report.tokens, report.padding_share, report.adapters, tenants)
        for histogram, value in zip(self._pass_histograms, values, strict=True):
            histogram.observe(value)
        parts = (report.base_seconds, report.low_rank_seconds, report.loss_seconds)
        for counter, seconds in zip(self._part_seconds, parts, strict=True):
            counter.inc(max(seconds, 0.0))
        if self._traces.is_on:
            figures: Figures = {
                "base": self._label,
                "tokens": report.tokens,
                "sequences": report.sequences,
                "tenants": tenants,
            }
            self._traces.pass_done(operations, seconds=report.seconds, figures=figures)

    def steps_done(self, operations: Sequence[ReadyOperation], *, seconds: float) -> None:
        """Record one fused optimizer step of the operations' adapters that has just ended."""
        self.counts.add_steps(len(operations), seconds=seconds)
        self._steps.inc(len(operations))
        self._metrics.step_seconds.labels(self._label).observe(seconds)
        if self._traces.is_on:
            figures: Figures = {"base": self._label, "adapters": len(operations)}
            self._traces.pass_done(operations, seconds=seconds, figures=figures, name="optimizer step")

    def finished(self, operation: ReadyOperation, outcome: Result | WeftError, *, share: float) -> None:
        """Record the outcome of an operation before it is written to the ledger; ``share`` is the tenant's weight."""
        if isinstance(outcome, WeftError):
            with working_on(operation):
                log.info("operation failed kind=%s code=%s", operation.kind, outcome.code)
            return
        if operation.kind in _TRAINED:
            self._metrics.tokens.labels(self._label, share_class(share), operation.kind.value).inc(operation.tokens)
        if isinstance(outcome, ForwardBackwardOutput):
            for name, histogram in self._policy.items():
                if name in outcome.metrics:
                    histogram.observe(outcome.metrics[name])
        if log.isEnabledFor(logging.DEBUG):
            with working_on(operation):
                log.debug("operation done kind=%s seq_id=%d", operation.kind, operation.seq_id)

    def paged_in(self) -> None:
        """Count an adapter that came back into memory."""
        self.counts.paged_in += 1
        self._paged_in.inc()

    def paged_out(self) -> None:
        """Count an adapter that has left memory."""
        self.counts.paged_out += 1
        self._paged_out.inc()

    def restored(self, *, replayed: int, seconds: float) -> None:
        """Record that an adapter was rebuilt from its snapshot and ``replayed`` operations after the snapshot."""
        self._metrics.replayed.labels(self._label).observe(replayed)
        self._metrics.restore_seconds.labels(self._label).observe(seconds)

    def snapshot_written(self, *, seconds: float) -> None:
        """Record that a run's snapshot was written and is in the database."""
        self._snapshots.inc()
        self._metrics.snapshot_seconds.labels(self._label).observe(seconds)

    def snapshot_failed(self) -> None:
        """Count a snapshot that could not be written. The run's replay grows until a later snapshot is written."""
        self._snapshot_failures.inc()

    def published(self, operation: ReadyOperation, *, seconds: float) -> None:
        """Record that live samplers follow the operation's version from now on."""
        self._metrics.publish_seconds.labels(self._label).observe(seconds)
        self._traces.worked(operation, "publish", started=time() - seconds, figures={"base": self._label})

    def self_tested(self, *, has_passed: bool) -> None:
        """Count a self-test of the device."""
        log.log(
            logging.WARNING if has_passed else logging.ERROR,
            "self-test base=%s %s",
            self._label,
            "passed: the failure before it is the operation's own" if has_passed else "failed",
        )
        self._metrics.self_tests.labels(self._label, "passed" if has_passed else "failed").inc()

    def device_failed(self, reason: str) -> None:
        """Count and log the end of this trainer because of its device."""
        log.critical(
            "the trainer of base=%s ends, its work stays pending for another one: %s", self._base_model, reason
        )
        self._metrics.device_failures.labels(self._label).inc()

    def log_summary(self) -> None:
        """Log the sums since the last summary, at most once in ``SUMMARY_SECONDS`` and not without passes or steps."""
        seconds = monotonic() - self._summed_up_at
        if seconds < SUMMARY_SECONDS:
            return
        new = self.counts.since(self._summed_up)
        if new.passes or new.optimizer_steps:
            log.info("trained base=%s seconds=%.0f %s", self._base_model, seconds, new)
        self._summed_up, self._summed_up_at = replace(self.counts), monotonic()

    def _log_pass(self, report: PassReport, tenants: int) -> None:
        log.debug(
            "pass base=%s tenants=%d adapters=%d sequences=%d tokens=%d padding=%.3f seconds=%.4f base_s=%.4f "
            "low_rank_s=%.4f loss_s=%.4f",
            self._base_model,
            tenants,
            report.adapters,
            report.sequences,
            report.tokens,
            report.padding_share,
            report.seconds,
            report.base_seconds,
            report.low_rank_seconds,
            report.loss_seconds,
        )
