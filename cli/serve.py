"""``weft serve``: API and workers composed into one process."""

import asyncio
import logging
import socket
import sys
from contextlib import AsyncExitStack

import typer

from api.services import ApiServices
from cli.address import address
from cli.admin_listener import serve_admin
from cli.base_models import read_base_models
from cli.http_server import ApiServer, bind
from cli.metrics_endpoint import serve_metrics_and_health
from cli.process import keep_pauses_short
from cli.readiness import readiness
from cli.ui import login_link
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
from tenants.audit import Actor, Door, record, rights_told
from tenants.audit_actions import Action
from tenants.audit_tally import write_last_counts
from tenants.keys import create_key, named_key
from tenants.login_codes import GREETING_LIFE, make_code
from tenants.rights import KeyRights, Role
from tenants.tenant_names import create_tenant, list_tenants
from workers.embedded import EmbeddedRunner
from workers.leases.apis import told_while_alive

log = logging.getLogger(__name__)

PROCESS = "serve"
"""Name of this process in logs and metrics."""
FIRST_TENANT = "default"
READY = "ready; Ctrl-C finishes the pass in hand and ends"
"""The last line of the greeting."""


async def serve(settings: Settings) -> None:
    """Run the embedded service until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    with serving_alone(settings.data_dir):
        await _serve_alone(settings)


async def _serve_alone(settings: Settings) -> None:
    bases = read_base_models(settings)
    listener = bind(settings)
    await asyncio.to_thread(upgrade, settings.resolved_database_url())
    # Off the event loop: reading a tokenizer takes long.
    vocabularies = {name: await asyncio.to_thread(read_vocabulary, facts.path) for name, facts in bases.items()}
    database = Database(create_engine(settings.resolved_database_url(), pool_size=settings.database_pool))
    wakeups, feed, publication = Wakeups(), TokenFeed(), LocalPublication()
    data_folder = DataFolder(settings.data_dir)
    telemetry, ready = open_telemetry(settings, PROCESS, utc_now), readiness(database, bases)
    ledger = Ledger(database, wakeups, utc_now, telemetry, PayloadFiles(data_folder))
    runtime = Runtime(settings, database, ledger, wakeups, feed, publication, data_folder, utc_now, telemetry)
    runner = EmbeddedRunner(runtime, publication, bases, vocabularies)
    services = ApiServices.over(runtime, bases, vocabularies, ready)
    ready.add("workers", runner.check)
    first_key = await make_first_key(database)
    metrics = AsyncExitStack()
    await metrics.enter_async_context(serve_metrics_and_health(telemetry, settings, database, ready, reads_queue=True))
    await metrics.enter_async_context(serve_admin(runtime, services.admission.loop_time))
    await runner.start()
    await metrics.enter_async_context(told_while_alive(runtime))
    ended_keys = asyncio.create_task(services.ended_keys.run(), name="ended keys")
    uses = asyncio.create_task(services.key_uses.run(), name="uses of keys")
    counting = asyncio.create_task(services.audit_tally.run(), name="counts of the audit log")
    server = ApiServer(services, settings, wakeups)
    server.end_on_signals()
    try:
        # From here on connections are queued: a client that reads "ready" may connect at once.
        listener.listen(server.config.backlog)
        keep_pauses_short()
        link = await make_first_link(database, address(listener), first_key)
        greet(address(listener), first_key, link)
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
        await metrics.aclose()
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


async def make_first_key(database: Database) -> str | None:
    """Make a tenant and its key at the very first start and return the key's secret; None at later starts."""
    async with database.write() as transaction:
        if await list_tenants(transaction):
            return None
        tenant = await create_tenant(transaction, name=FIRST_TENANT, clock=utc_now)
        rights, note, service = KeyRights(Role.ADMIN), "made at first start", Actor(Door.SERVICE, PROCESS)
        key = await create_key(transaction, tenant=tenant, note=note, clock=utc_now, rights=rights)
        now, told = utc_now(), rights_told(rights, note)
        await record(transaction, service, Action.TENANT_CREATE, tenant, tenant=tenant, now=now)
        await record(transaction, service, Action.KEY_CREATE, key.prefix, tenant=tenant, now=now, after=told)
        return key.secret


async def make_first_link(database: Database, url: str, first_key: str | None) -> str:
    """Return the dashboard's address; at the very first start a link that logs in with the first key, once."""
    if first_key is None:
        return f"{url}/ui"
    async with database.write() as transaction:
        key = await named_key(transaction, first_key)
        code = await make_code(transaction, key.id, now=utc_now(), life=GREETING_LIFE)
    return login_link(url, code)


def greet(url: str, first_key: str | None, link: str) -> None:
    """Print the service's address, the dashboard's, and the variables that clients need."""
    lines = [f"weft listens on {url}", f"dashboard: {link}", f"export TINKER_BASE_URL={url}"]
    if first_key is not None:
        lines.append(f"export TINKER_API_KEY={first_key}")
        lines.append(f"(the key of tenant {FIRST_TENANT!r}, shown only now; `weft key create` makes more)")
    else:
        lines.append("TINKER_API_KEY: a key made before, or a new one from `weft key create`")
    lines.append(READY)
    typer.echo("\n".join(lines))
    sys.stdout.flush()
