"""``weft serve``: API and workers composed into one process."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

from api.services import ApiServices
from cli.address import address
from cli.admin_listener import serve_admin
from cli.base_models import read_base_models
from cli.data_folder_check import check_data_folder, check_database_is_there
from cli.greeting import greet
from cli.http_server import ApiServer, bind
from cli.metrics_endpoint import serve_metrics_and_health
from cli.process import keep_pauses_short
from cli.readiness import readiness
from contracts.errors import ProcessMustEnd
from engine.sampling.vocabulary import read_vocabulary
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.publication import LocalPublication
from ledger.runtime import Runtime
from ledger.token_feed import TokenFeed
from ledger.wakeups import Wakeups
from migrations.upgrade import upgrade
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database, create_engine
from store.serving_lock import serving_alone
from store.settings import Settings
from telemetry.telemetry import open_telemetry
from tenants.audit_tally import write_last_counts
from workers.embedded import EmbeddedRunner
from workers.leases.apis import told_while_alive

log = logging.getLogger(__name__)

PROCESS = "serve"
"""Name of this process in logs and metrics."""


async def serve(settings: Settings) -> None:
    """Run the embedded service until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    with serving_alone(settings.data_dir):
        await _serve_alone(settings)


async def _serve_alone(settings: Settings) -> None:
    bases = read_base_models(settings)
    listener = bind(settings)
    check_database_is_there(settings)
    await asyncio.to_thread(upgrade, settings.resolved_database_url())
    # Off the event loop: reading a tokenizer takes long.
    vocabularies = {name: await asyncio.to_thread(read_vocabulary, facts.path) for name, facts in bases.items()}
    database = Database(create_engine(settings.resolved_database_url(), pool_size=settings.database_pool))
    wakeups, feed, publication = Wakeups(), TokenFeed(), LocalPublication()
    data_folder = DataFolder(settings.data_dir)
    await check_data_folder(database, data_folder)
    telemetry, ready = open_telemetry(settings, PROCESS, utc_now), readiness(database, bases)
    ledger = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(data_folder))
    runtime = Runtime(settings, database, ledger, wakeups, feed, publication, data_folder, utc_now, telemetry)
    runner = EmbeddedRunner(runtime, publication, bases, vocabularies)
    services = ApiServices.over(runtime, bases, vocabularies, ready)
    ready.add("workers", runner.check)
    listeners = AsyncExitStack()
    await listeners.enter_async_context(
        serve_metrics_and_health(telemetry, settings, database, ready, reads_queue=True)
    )
    await listeners.enter_async_context(serve_admin(runtime, services.admission.loop_time))
    await runner.start()
    await listeners.enter_async_context(told_while_alive(runtime))
    ended_keys = asyncio.create_task(services.ended_keys.run(), name="ended keys")
    uses = asyncio.create_task(services.key_uses.run(), name="uses of keys")
    counting = asyncio.create_task(services.audit_tally.run(), name="counts of the audit log")
    server = ApiServer(services, settings, wakeups)
    server.end_on_signals()
    try:
        # From here on connections are queued: a client that reads "ready" may connect at once.
        listener.listen(server.config.backlog)
        keep_pauses_short()
        await greet(database, address(listener))
        await _serve(server, listener, runner)
    except ProcessMustEnd:
        await runner.give_up()
        raise
    finally:
        log.info("finishing the pass in hand and writing snapshots")
        ended_keys.cancel()
        uses.cancel()
        counting.cancel()
        await write_last_counts(services.audit_tally)
        await runner.stop()
        await listeners.aclose()
        await database.close()


async def _serve(server: ApiServer, listener: socket.socket, runner: EmbeddedRunner) -> None:
    """Answer requests until the process is asked to end. Raises the error of a worker that has ended."""
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="API")
    failing = asyncio.create_task(runner.until_failed(), name="workers")
    try:
        await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done() and isinstance(failing.exception(), ProcessMustEnd):
            await failing
        server.should_exit = True
        await serving
        if failing.done():
            await failing
    finally:
        failing.cancel()
