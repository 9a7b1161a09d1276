"""The event loop's lag: how late the loop comes back to a timer."""

import asyncio
from collections import deque
from time import monotonic

from store.repeat import wait_for
from telemetry.metrics import Metrics

LAG_SECONDS = 0.5
_LAGS_KEPT = 20


async def watch_loop_lag(metrics: Metrics, stopping: asyncio.Event) -> None:
    """Measure the event loop's lag in seconds until ``stopping``; the metric shows the largest of the last looks."""
    lags: deque[float] = deque(maxlen=_LAGS_KEPT)
    began = monotonic()
    while not await wait_for(stopping, LAG_SECONDS):
        lags.append(max(0.0, monotonic() - began - LAG_SECONDS))
        metrics.loop_lagged(max(lags))
        began = monotonic()
