"""Looks for jobs on weights: a process with a job in hand hands the message on, so that one without a job gets it.

Messages go to processes in turns. Without this, the same busy process might get each of them while another one idles.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from celery import Celery
from kombu.exceptions import OperationalError

from workers.cluster.celery_app import send_job_look

log = logging.getLogger(__name__)

MOST_HOPS = 8
"""Times that one message is handed on; the next one comes within seconds."""


class JobLooks:
    """Task of the jobs: ``run_all`` runs those that wait, unless ``is_busy``."""

    def __init__(self, celery: Celery, is_busy: Callable[[], bool], run_all: Callable[[], Awaitable[None]]) -> None:
        self._celery = celery
        self._is_busy = is_busy
        self._run_all = run_all

    async def look(self, hops: int = 0) -> None:
        """Run the jobs that wait, or hand the message on, which ``hops`` processes have done. Raises ``Unavailable``."""
        if not self._is_busy():
            await self._run_all()
        elif hops < MOST_HOPS:
            try:
                await asyncio.to_thread(send_job_look, self._celery, hops + 1)
            except (OperationalError, OSError) as error:
                log.warning("a look for jobs could not be handed on: %s", error)
