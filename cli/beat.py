"""``weft beat``: sends housekeeping tasks to Celery when they are due.

Each step of housekeeping is a task of its own. Two beats do no harm: a task that runs twice finds nothing left to do.
"""

from celery.apps.beat import Beat

from cli.cluster_runtime import check_cluster
from cli.process import log_to_standard_error
from cli.standard_output import say
from store.settings import Settings
from workers.cluster.celery_app import beat_schedule, make_celery
from workers.housekeeping.schedule import StepName, interval


def send_when_due(settings: Settings) -> None:
    """Send tasks until SIGINT or SIGTERM. Blocking. Raises ``InvalidRequest`` for settings that are not a cluster's."""
    check_cluster(settings)
    log_to_standard_error(settings, "beat")
    say("ready; housekeeping is sent when it is due")
    # Celery leaves a root logger that has a handler alone, and with ``redirect_stdouts`` off standard output, too.
    app = make_celery(settings)
    app.conf.beat_schedule = beat_schedule({step: interval(step, settings) for step in StepName})
    beat = Beat(
        app=app,
        loglevel=settings.log_level,
        quiet=True,
        redirect_stdouts=False,
    )
    beat.run()
