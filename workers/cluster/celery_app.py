"""The Celery app of a cluster: declares the tasks, whose messages tell one of several workers to look for work in the database.

Correctness does not depend on any message. When a message is lost, a later message or a trainer's own look finds the work.
When a message comes twice, the second one finds nothing left to do.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import Celery

from store.settings import Settings

PLACE = "weft.place"
"""Task of trainers: claim runs of a base model that wait for a trainer."""
ANNOUNCE = "weft.announce"
"""Task of housekeeping: announce placements again that no trainer has claimed."""
JOBS = "weft.jobs"
"""Task of trainers' processes: run the jobs on weights that wait."""
_STEP_TASK = "weft.housekeeping."

HOUSEKEEPING = "housekeeping"
_MOST_HINTS = 8
"""Messages of placements that may wait in one queue. Each says the same: look."""
_ANNOUNCE_SECONDS = 5.0
_VISIBILITY_SECONDS = 600
"""Seconds after which Redis hands an unacknowledged message to another worker: more than any task takes but a
job, which has a lease of its own."""
_CONNECT_SECONDS = 3.0


def training_queue(base_model: str) -> str:
    """Return the queue of placements for trainers of the base model."""
    return f"training.{base_model}"


def make_celery(settings: Settings) -> Celery:
    """Return the app, for processes that send tasks and processes that run them. Raises ``ValueError`` without a Redis."""
    if settings.redis_url is None:
        raise ValueError("a cluster needs WEFT_REDIS_URL")
    app = Celery("weft", broker=settings.redis_url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=HOUSEKEEPING,
        # Acknowledged when done: a worker that dies with a message leaves it to another.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        # One message at a time: a second one would wait here, while an idle trainer could act on it.
        worker_prefetch_multiplier=1,
        broker_transport_options={
            "visibility_timeout": _VISIBILITY_SECONDS,
            "global_keyprefix": f"{settings.redis_namespace}:celery:",
            "socket_timeout": _CONNECT_SECONDS,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "retry_on_timeout": True,
        },
        broker_connection_timeout=_CONNECT_SECONDS,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # Not retried, since a sender must not wait. A placement that could not be announced is still in the table.
        task_publish_retry=False,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # Seen by `celery inspect` and by monitors of tasks.
        task_track_started=True,
        worker_send_task_events=True,
        # Without a clock of its own in the message: hosts' clocks differ.
        beat_scheduler="workers.cluster.sparing_scheduler:SparingScheduler",
    )
    return app


def step_task(step: str) -> str:
    """Return the task that runs the step of housekeeping."""
    return f"{_STEP_TASK}{step}"


def beat_schedule(steps: Mapping[str, timedelta]) -> dict[str, dict[str, Any]]:
    """Return beat's schedule: a task for each step of housekeeping by its interval, and the looks for placements and jobs.

    The messages never expire. Celery would compare the sender's clock with the worker's: one that is late by more than the
    interval would lose every message.
    """
    often = {ANNOUNCE: _ANNOUNCE_SECONDS, JOBS: _ANNOUNCE_SECONDS}
    tasks = often | {step_task(step): every.total_seconds() for step, every in steps.items()}
    return {
        task: {"task": task, "schedule": seconds, "options": {"queue": HOUSEKEEPING}} for task, seconds in tasks.items()
    }


def waiting_messages(app: Celery, queue: str) -> int:
    """Return how many messages wait in the queue. Blocking. Raises kombu's ``OperationalError`` without a broker."""
    with app.producer_or_acquire() as producer:
        found: int = producer.channel.queue_declare(queue=queue).message_count
    return found


def send_placement(app: Celery, base_model: str) -> None:
    """Tell one trainer of the base model to claim runs, unless several messages say so already.

    Blocking. Raises kombu's ``OperationalError`` without a broker.
    """
    queue = training_queue(base_model)
    if waiting_messages(app, queue) < _MOST_HINTS:
        app.send_task(PLACE, args=[base_model], queue=queue)


def send_job_look(app: Celery, hops: int) -> None:
    """Tell one of the processes to look for jobs. Blocking. Raises kombu's ``OperationalError`` without a broker."""
    app.send_task(JOBS, args=[hops], queue=HOUSEKEEPING)
