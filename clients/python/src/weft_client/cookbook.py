"""Metrics of tinker-cookbook's loops as metrics of a weft run.

``WeftLogger`` has every method of ``tinker_cookbook.utils.ml_log.Logger``, and imports nothing of the package.
"""

import logging
from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any
from urllib.parse import quote

from weft_client.errors import BadRequest, WeftClientError
from weft_client.synchronous import Weft

MOST_VALUES = 2000
"""Values of one request."""
LONGEST_NAME = 100
MOST_NAMES = 200
"""Names of one run's metrics."""

log = logging.getLogger(__name__)


class WeftLogger:
    """Logger that records each number under its name and step with the run. Texts and settings stay with other loggers.

    A failure to record is logged and stops no training. Give it to the cookbook beside its own:
    ``MultiplexLogger([..., WeftLogger(run)])``.
    """

    def __init__(self, run: str, weft: Weft | None = None) -> None:
        self._run = run
        self._weft = weft or Weft()
        self._is_own = weft is None
        self._step = 0
        self._refused: set[str] = set()
        """Names for which the run has no room."""

    def log_hparams(self, config: Any) -> None:
        """Do nothing: weft keeps a run's own settings."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Record the numbers among ``metrics`` at ``step``, by default the step after the last."""
        self._step = self._step + 1 if step is None else step
        numbers = _numbers(metrics)
        names = iter([name for name in numbers if name not in self._refused])
        while some := list(islice(names, MOST_VALUES)):
            try:
                self._record({name: numbers[name] for name in some})
            except WeftClientError as error:
                log.warning("metrics of step %d were not recorded: %s", self._step, error)

    def _record(self, numbers: Mapping[str, float | None]) -> None:
        """Record the numbers at the step. If the run has no room for all names, record those for which it has."""
        try:
            self._weft.runs.add_metrics(self._run, {self._step: numbers})
        except BadRequest as error:
            known = self._weft.runs.get(self._run).metrics
            new = [name for name in numbers if name not in known]
            refused = set(new[max(0, MOST_NAMES - len(known)) :])
            if not refused:
                raise
            if fitting := {name: number for name, number in numbers.items() if name not in refused}:
                self._weft.runs.add_metrics(self._run, {self._step: fitting})
            self._refused |= refused
            log.warning("metrics of these names are not recorded: %s: %s", ", ".join(sorted(refused)), error)

    def enable_event_steps(self) -> None:
        """Do nothing: a value is recorded under its own step, in whatever order they come."""

    def log_metrics_event(
        self,
        metrics: dict[str, Any],
        step: int,
        step_metric: str,
        metric_axes: dict[str, str] | None = None,
    ) -> None:
        """Record the numbers among ``metrics`` at ``step``."""
        self.log_metrics(metrics | {step_metric: step}, step=step)

    def log_summary(self, metrics: dict[str, Any]) -> None:
        """Do nothing: a value without a step is none of a curve's."""

    @property
    def store(self) -> None:
        """None: the logger has no store of a training run."""
        return

    def log_long_text(self, key: str, text: str) -> None:
        """Do nothing: weft keeps numbers."""

    def close(self) -> None:
        """Close the logger's own client."""
        if self._is_own:
            self._weft.close()

    def sync(self) -> None:
        """Do nothing: metrics are recorded when they are logged."""

    def get_logger_url(self) -> str | None:
        """Return the address of the run's page on the dashboard, which asks for a login."""
        return f"{self._weft.base_url}/ui/runs/{quote(self._run, safe=':')}"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers by their names, cut to what weft holds; None for one that is not finite."""
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        if isinstance(value, str | bytes) or value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
        found[name[:LONGEST_NAME]] = number if isfinite(number) else None
    return found
