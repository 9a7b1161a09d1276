"""``weft beat``: sends housekeeping tasks to Celery when they are due.

Two beats do no harm: a task that runs twice finds nothing left to do.
"""

import typer
from celery.apps.beat import Beat

from cli.cluster_runtime import check_cluster
from cli.process import log_to_standard_error
from store.settings import Settings
from workers.cluster.celery_app import make_celery


def send_when_due(settings: Settings) -> None:
    """Send tasks until SIGINT or SIGTERM. Blocking. Raises ``InvalidRequest`` for settings that are not a cluster's."""
    check_cluster(settings)
    log_to_standard_error(settings, "beat")
    typer.echo("ready; housekeeping is sent when it is due")
    # Celery leaves a root logger that has a handler alone, and with ``redirect_stdouts`` off standard output, too.
    beat = Beat(
        app=make_celery(settings),
        # In memory, without a file: a missed interval is no loss.
        scheduler="celery.beat:Scheduler",
        loglevel=settings.log_level,
        quiet=True,
        redirect_stdouts=False,
    )
    beat.run()
