"""The Celery of a cluster: what tells one of several workers that there is something to do. The database says what.

Chosen so that no message matters. A lost one is sent again by the next sweep or found by a trainer's own look; a doubled
one finds nothing left to do.
"""

from typing import Any

from celery import Celery

from store.settings import Settings

PLACE = "weft.place"
"""Runs of a base model wait for a trainer: whoever gets this claims its share."""
SWEEP = "weft.sweep"
"""Sessions, checkpoints, futures and gates whose time is over."""
ANNOUNCE = "weft.announce"
"""Placements whose announcement was lost are announced again."""
REMOVE_ORPHANS = "weft.remove_orphans"
"""Folders that no row names."""

HOUSEKEEPING = "housekeeping"
_HINT_SECONDS = 30.0
"""A placement that is not claimed by then has been announced again."""
_ANNOUNCE_SECONDS = 5.0
_ORPHANS_SECONDS = 3600.0
_VISIBILITY_SECONDS = 600
"""Redis hands a message that was not acknowledged to another worker after this; longer than any task of weft's."""
_CONNECT_SECONDS = 3.0


def training_queue(base_model: str) -> str:
    """Where trainers of the base model hear of placements."""
    return f"training.{base_model}"


def make_celery(settings: Settings) -> Celery:
    """The app, for those who send and those who work. Raises ``ValueError`` without a Redis."""
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
        # One at a time: a hint that waits behind another is no use to a trainer that is idle.
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
        # Who sends must not wait: what could not be sent is still in the outbox.
        task_publish_retry=False,
        worker_hijack_root_logger=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        beat_schedule=_schedule(settings),
    )
    return app


def _schedule(settings: Settings) -> dict[str, dict[str, Any]]:
    """What beat sends, and when; a message that nobody took by the next one is dropped."""
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
    """Tell one trainer of the base model. Blocking. Raises kombu's ``OperationalError`` when the broker is gone."""
    app.send_task(PLACE, args=[base_model], queue=training_queue(base_model), expires=_HINT_SECONDS)
