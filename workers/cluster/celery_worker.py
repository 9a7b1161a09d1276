"""A Celery worker inside an asyncio process: messages arrive on its thread, tasks run on the event loop."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from celery.worker import WorkController, state

log = logging.getLogger(__name__)
# A line for each message that comes, many a minute. How a task ends has a line of its own.
logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)

TASK_SECONDS = 300.0
"""Longest time of a task in seconds; it is then cancelled and retried."""
_RETRIES = 4
_LONGEST_BACKOFF_SECONDS = 60
_AT_ONCE = 3
"""Tasks that run at once, on the one event loop: a job and a long one do not keep placements waiting."""
_RESTART_SECONDS = 2.0
_STOP_SECONDS = 10.0

Handler = Callable[..., Awaitable[object]]


class CeleryWorker:
    """Consumer of ``queues`` until ``stop``. At most one in a process: Celery keeps its stop flag in a module."""

    def __init__(
        self,
        app: Celery,
        queues: Sequence[str],
        handlers: Mapping[str, Handler],
        *,
        name: str,
        seconds: Mapping[str, float | None] | None = None,
    ) -> None:
        """``handlers`` are coroutine functions by task name; they run on the loop that calls ``start``.

        ``seconds`` are the longest times of tasks that may take longer than ``TASK_SECONDS``; None: any time.
        """
        self._app = app
        self._queues = queues
        self._name = name
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._consume, name="celery", daemon=True)
        for task, handler in handlers.items():
            self._register(task, handler, (seconds or {}).get(task, TASK_SECONDS))

    def start(self) -> None:
        """Start the thread; call it on the event loop that tasks should run on."""
        self._loop = asyncio.get_running_loop()
        # A worker that this process had before has left its flag.
        state.should_stop = None
        self._thread.start()

    async def stop(self) -> None:
        """Take no more messages and wait for the task in hand."""
        self._stopping.set()
        state.should_stop = 0
        await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    def _register(self, name: str, handler: Handler, seconds: float | None) -> None:
        def run(*arguments: Any) -> None:
            if self._loop is None:
                raise RuntimeError("the worker was not started")
            # The time limit is the coroutine's: Celery could only kill a process.
            asyncio.run_coroutine_threadsafe(_awaited(handler, arguments, seconds), self._loop).result()

        self._app.task(
            run,
            name=name,
            shared=False,
            lazy=False,
            time_limit=seconds,
            max_retries=_RETRIES,
            autoretry_for=(Exception,),
            retry_backoff=True,
            retry_backoff_max=_LONGEST_BACKOFF_SECONDS,
            retry_jitter=True,
        )

    def _consume(self) -> None:
        # Celery's tracer looks for the app in this thread, and in the threads that run tasks.
        self._app.set_current()
        self._app.set_default()
        while not self._stopping.is_set():
            try:
                controller = WorkController(
                    app=self._app,
                    # Threads that only wait for the loop, so that Celery answers `inspect` while tasks run.
                    pool="threads",
                    concurrency=_AT_ONCE,
                    hostname=self._name,
                    queues=",".join(self._queues),
                    loglevel=logging.WARNING,
                    without_gossip=True,
                    without_mingle=True,
                    without_heartbeat=True,
                )
                controller.start()
            except Exception:
                log.exception("the Celery worker ended; starting it again")
            self._stopping.wait(_RESTART_SECONDS)


async def _awaited(handler: Handler, arguments: Sequence[Any], seconds: float | None) -> None:
    async with asyncio.timeout(seconds):
        await handler(*arguments)
