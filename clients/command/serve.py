"""``weft serve``: the one place that composes API and workers into a process."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
import uvicorn
import uvloop

from api.app import create_app
from api.services import ApiServices
from clients.command.base_models import read_base_models
from engine.contracts.errors import WeftError
from engine.sampling.vocabulary import read_vocabulary
from migrations.upgrade import upgrade
from tenants.clock import utc_now
from tenants.data_folder import DataFolder
from tenants.database import Database, create_engine
from tenants.keys import create_key, create_tenant, list_tenants
from tenants.settings import Settings
from workers.embedded import EmbeddedRunner
from workers.ledger.ledger import Ledger
from workers.ledger.publication import Publication
from workers.ledger.token_feed import TokenFeed
from workers.ledger.wakeups import Wakeups

log = logging.getLogger(__name__)

FIRST_TENANT = "default"
READY = "ready; Ctrl-C finishes the pass in hand and ends"
"""The last line of the greeting."""


async def serve(settings: Settings) -> None:
    """Run the embedded service until SIGINT or SIGTERM. Raises ``WeftError`` when it cannot start."""
    bases = read_base_models(settings)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    listener = _bind(settings)
    await asyncio.to_thread(upgrade, settings.resolved_database_url())
    # Off the event loop: tokenizers take long to read.
    vocabularies = {name: await asyncio.to_thread(read_vocabulary, facts.path) for name, facts in bases.items()}
    database = Database(create_engine(settings.resolved_database_url()))
    wakeups, feed, publication = Wakeups(), TokenFeed(), Publication()
    data_folder = DataFolder(settings.data_dir)
    ledger = Ledger(database, wakeups, utc_now)
    runner = EmbeddedRunner(
        settings=settings,
        database=database,
        ledger=ledger,
        wakeups=wakeups,
        feed=feed,
        publication=publication,
        data_folder=data_folder,
        clock=utc_now,
        bases=bases,
        vocabularies=vocabularies,
    )
    services = ApiServices(
        settings=settings,
        database=database,
        ledger=ledger,
        clock=utc_now,
        data_folder=data_folder,
        bases=bases,
        vocabularies=vocabularies,
        feed=feed,
        publication=publication,
    )
    first_key = await _first_key(database)
    await runner.start()
    config = _uvicorn_config(services, settings)
    server = _Server(config, wakeups)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.ask_to_end)
    try:
        # From here on connections are queued: who reads "ready" may connect at once.
        listener.listen(config.backlog)
        _greet(listener, first_key)
        await server.serve(sockets=[listener])
    finally:
        log.info("finishing the pass in hand and writing snapshots")
        await runner.stop()
        await database.close()


def _uvicorn_config(services: ApiServices, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(services),
        log_level=settings.log_level,
        access_log=False,
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=10,
    )


class _Server(uvicorn.Server):
    """Lets held polls go when the process is asked to end; the SDK polls again after the restart."""

    def __init__(self, config: uvicorn.Config, wakeups: Wakeups) -> None:
        super().__init__(config)
        self._wakeups = wakeups

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to ``serve``: uvicorn would raise them again and cut the snapshots short."""
        yield

    def ask_to_end(self) -> None:
        """Stop taking requests and end."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._wakeups.announce_all()
        await super().shutdown(sockets)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _CannotListen(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); stop what listens there or pass --port"
        ) from error
    return listener


class _CannotListen(WeftError):
    """The address is taken or not ours."""

    code = "cannot_listen"


async def _first_key(database: Database) -> str | None:
    """On the very first start, a tenant and its key."""
    async with database.write() as transaction:
        if await list_tenants(transaction):
            return None
        tenant = await create_tenant(transaction, name=FIRST_TENANT, clock=utc_now)
        return (await create_key(transaction, tenant=tenant, note="made at first start", clock=utc_now)).secret


def _greet(listener: socket.socket, first_key: str | None) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    lines = [f"weft listens on http://{shown}:{port}", f"export TINKER_BASE_URL=http://{shown}:{port}"]
    if first_key is not None:
        lines.append(f"export TINKER_API_KEY={first_key}")
        lines.append(f"(the key of tenant {FIRST_TENANT!r}, shown only now; `weft key create` makes more)")
    else:
        lines.append("TINKER_API_KEY: a key made before, or a new one from `weft key create`")
    lines.append(READY)
    typer.echo("\n".join(lines))
    sys.stdout.flush()


def run(settings: Settings) -> None:
    """Blocking entry of the command."""
    Path(settings.data_dir).mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))
