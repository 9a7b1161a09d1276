"""``weft beat``: sends housekeeping tasks when they are due. Two of them do no harm: what is done twice finds nothing."""

import typer
from celery.apps.beat import Beat

from clients.command.cluster_fabric import check_cluster
from tenants.settings import Settings
from workers.cluster.celery_app import make_celery


def beat(settings: Settings) -> None:
    """Blocking, until SIGINT or SIGTERM. Raises ``InvalidRequest`` for settings that are not a cluster's."""
    check_cluster(settings)
    typer.echo("ready; housekeeping is sent when it is due")
    # In memory: an interval that was missed is no loss, and there is no file to keep.
    Beat(app=make_celery(settings), scheduler="celery.beat:Scheduler", loglevel=settings.log_level, quiet=True).run()
