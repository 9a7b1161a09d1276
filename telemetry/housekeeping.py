"""Metrics of housekeeping's steps, from their records in the database: any process may have run them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from store.clock import Clock


@dataclass(frozen=True, slots=True)
class StepState:
    """A step's last run: its length, its last success, and since when it has left work over or failed. None: never."""

    name: str
    seconds: float
    succeeded_at: datetime | None
    behind_since: datetime | None
    failing_since: datetime | None


class HousekeepingCollector(Collector):
    """Housekeeping's steps as last read. While the database does not answer nothing is shown, since it would mislead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._states: Sequence[StepState] = ()

    def put(self, states: Sequence[StepState] | None) -> None:
        """Show ``states`` from now on; None means that the database did not answer."""
        self._states = states or ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of one scrape."""
        labels, now = ("step",), self._clock()
        success = GaugeMetricFamily(
            "weft_housekeeping_success_age_seconds", "Seconds since the step last succeeded.", labels=labels
        )
        length = GaugeMetricFamily("weft_housekeeping_run_seconds", "Seconds of the step's last run.", labels=labels)
        backlog = GaugeMetricFamily(
            "weft_housekeeping_backlog_seconds",
            "Seconds for which every run of the step has left work over; 0 when the last one left none.",
            labels=labels,
        )
        failing = GaugeMetricFamily(
            "weft_housekeeping_failing_seconds",
            "Seconds since the step's runs began to fail; 0 when the last one did not.",
            labels=labels,
        )

        def age(since: datetime | None) -> float:
            return 0.0 if since is None else max(0.0, (now - since).total_seconds())

        for state in self._states:
            if state.succeeded_at is not None:
                success.add_metric((state.name,), age(state.succeeded_at))
            length.add_metric((state.name,), state.seconds)
            backlog.add_metric((state.name,), age(state.behind_since))
            failing.add_metric((state.name,), age(state.failing_since))
        yield from (success, length, backlog, failing)
