"""Event loop lag: the delay between a timer's due time and its run."""

import asyncio
from collections import deque
from time import monotonic

from store.repeat import wait_for_any
from telemetry.metrics import Metrics

LAG_SECONDS = 0.5
"""Seconds between two measurements."""
_LAGS_KEPT = 20


async def watch_loop_lag(metrics: Metrics, stopping: asyncio.Event) -> None:
    """Measure the event loop's lag in seconds until ``stopping``. The metric shows the largest recent lag."""
    lags: deque[float] = deque(maxlen=_LAGS_KEPT)
    began = monotonic()
    while not await wait_for_any([stopping], LAG_SECONDS):
        lags.append(max(0.0, monotonic() - began - LAG_SECONDS))
        metrics.loop_lagged(max(lags))
        began = monotonic()
