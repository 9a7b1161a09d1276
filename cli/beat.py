"""``weft beat``: sends housekeeping tasks when they are due. Two of them do no harm: what is done twice finds nothing."""

import typer
from celery.apps.beat import Beat

from cli.cluster_runtime import check_cluster
from cli.process import log_to_standard_error
from store.settings import Settings
from workers.cluster.celery_app import make_celery


def send_when_due(settings: Settings) -> None:
    """Blocking, until SIGINT or SIGTERM. Raises ``InvalidRequest`` for settings that are not a cluster's."""
    check_cluster(settings)
    log_to_standard_error(settings, "beat")
    typer.echo("ready; housekeeping is sent when it is due")
    # Celery leaves a root logger alone that has a handler, and standard output, too, when it is told to.
    beat = Beat(
        app=make_celery(settings),
        # In memory: an interval that was missed is no loss, and there is no file to keep.
        scheduler="celery.beat:Scheduler",
        loglevel=settings.log_level,
        quiet=True,
        redirect_stdouts=False,
    )
    beat.run()
