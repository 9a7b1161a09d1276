"""``weft api``: one of a cluster's API processes. It keeps no state, so each process can answer each request."""

import asyncio
import logging
from contextlib import AsyncExitStack

from api.services import ApiServices
from cli.address import address
from cli.admin_listener import serve_admin
from cli.base_models import read_base_models
from cli.cluster_runtime import API, open_cluster
from cli.http_server import ApiServer, bind
from cli.process import keep_pauses_short
from cli.standard_output import say
from engine.sampling.vocabulary import read_vocabulary
from store.settings import Settings
from tenants.audit_tally import write_last_counts
from workers.cluster.placements import PlacementAnnouncer
from workers.housekeeping.presence import PresenceNotes
from workers.leases.apis import told_while_alive

log = logging.getLogger(__name__)


async def serve_api(settings: Settings) -> None:
    """Answer requests until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    bases = read_base_models(settings)
    listener = bind(settings, shared=True)
    vocabularies = {name: await asyncio.to_thread(read_vocabulary, facts.path) for name, facts in bases.items()}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(open_cluster(settings, API, bases))
        runtime = cluster.runtime
        services = ApiServices.over(runtime, bases, vocabularies, cluster.readiness)
        announcer = PlacementAnnouncer(cluster.celery, runtime)
        announcing = asyncio.create_task(announcer.run(bases), name="placements")
        stack.callback(announcing.cancel)
        present = asyncio.create_task(PresenceNotes(runtime).run(), name="presence")
        stack.callback(present.cancel)
        await stack.enter_async_context(told_while_alive(runtime))
        ended_keys = asyncio.create_task(services.ended_keys.run(), name="ended keys")
        stack.callback(ended_keys.cancel)
        uses = asyncio.create_task(services.key_uses.run(), name="uses of keys")
        stack.callback(uses.cancel)
        counting = asyncio.create_task(services.audit_tally.run(), name="counts of the audit log")
        stack.push_async_callback(write_last_counts, services.audit_tally)
        stack.callback(counting.cancel)
        await stack.enter_async_context(serve_admin(runtime, services.admission.loop_time, shared=True))
        server = ApiServer(services, settings, runtime.wakeups)
        server.end_on_signals()
        listener.listen(server.config.backlog)
        keep_pauses_short()
        say(f"ready; the API listens on {address(listener)}")
        await server.serve(sockets=[listener])
