"""The Celery app of a cluster: declares the tasks, whose messages tell one of several workers to look for work in the database.

Correctness does not depend on any message. When a message is lost, a later message or a trainer's own look finds the work.
When a message comes twice, the second one finds nothing left to do.
"""

from typing import Any

from celery import Celery

from store.settings import Settings

PLACE = "weft.place"
"""Task of trainers: claim runs of a base model that wait for a trainer."""
SWEEP = "weft.sweep"
"""Task of housekeeping: delete sessions, checkpoints, results and gates that have expired."""
ANNOUNCE = "weft.announce"
"""Task of housekeeping: announce placements again that no trainer has claimed."""
REMOVE_ORPHANS = "weft.remove_orphans"
"""Task of housekeeping: remove folders that no row names."""

HOUSEKEEPING = "housekeeping"
_HINT_SECONDS = 30.0
"""Life of a placement's message, in seconds. A placement that is not claimed by then has been announced again."""
_ANNOUNCE_SECONDS = 5.0
_ORPHANS_SECONDS = 3600.0
_VISIBILITY_SECONDS = 600
"""Seconds after which Redis hands an unacknowledged message to another worker: more than any task of weft takes."""
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
        beat_schedule=_schedule(settings),
    )
    return app


def _schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return beat's schedule: tasks by interval. A message that no worker took before the next one is dropped."""
    intervals = {
        SWEEP: settings.housekeeping_interval.total_seconds(),
        ANNOUNCE: _ANNOUNCE_SECONDS,
        REMOVE_ORPHANS: _ORPHANS_SECONDS,
    }
    return {
        task: {"task": task, "schedule": seconds, "options": {"queue": HOUSEKEEPING, "expires": seconds}}
        for task, seconds in intervals.items()
    }


def send_placement(app: Celery, base_model: str) -> None:
    """Tell one trainer of the base model to claim runs. Blocking. Raises kombu's ``OperationalError`` without a broker."""
    app.send_task(PLACE, args=[base_model], queue=training_queue(base_model), expires=_HINT_SECONDS)
