"""uvicorn as a part of a process that handles its signals itself."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from store.settings import Settings


def server_config(app: Any, settings: Settings, http: Any) -> uvicorn.Config:
    """Return the configuration of every server of weft."""
    return uvicorn.Config(
        app,
        log_level=settings.log_level,
        access_log=False,
        log_config=None,
        # The application reads forwarded headers itself, from trusted proxies only.
        proxy_headers=False,
        http=http,
        timeout_keep_alive=math.ceil(settings.keep_alive.total_seconds()),
        timeout_graceful_shutdown=10,
    )


class SignalFreeServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the process: uvicorn would raise them again, and cut snapshots short."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield
