"""The admin listener of a process: the admin API on a port of its own, for operators' keys, while the process works."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api.admin.app import by_key, create_admin_app
from api.admin.services import AdminServices
from api.dashboard.operators.app import create_operator_pages, with_operator_pages
from api.loop_time import LoopTime
from api.route_building import build_routes
from cli.address import address, bind_address
from cli.housekeeper import ServiceHousekeeper
from cli.http_protocol import protocol
from cli.signal_free_server import SignalFreeServer, server_config
from ledger.runtime import Runtime
from tenants.audit_tally import AuditTally, write_last_counts
from tenants.limits import Limits
from tenants.signed_tokens import TokenSigner

log = logging.getLogger(__name__)


@asynccontextmanager
async def serve_admin(runtime: Runtime, loop_time: LoopTime, *, shared: bool = False) -> AsyncIterator[str | None]:
    """Serve the admin API inside the block, if the settings name a port, and yield its address, else None.

    ``loop_time``: the turns on this event loop, which others on it share. ``shared``: other processes may listen there, too.
    Raises ``CannotListen``.
    """
    settings = runtime.settings
    if settings.admin_port is None:
        yield None
        return
    listener = bind_address(settings.admin_host, settings.admin_port, shared=shared, setting="WEFT_ADMIN_PORT")
    tally = AuditTally(runtime.database, runtime.clock)
    services = AdminServices(
        runtime=runtime,
        limits=Limits.of(settings),
        signer=TokenSigner(runtime.data_folder, runtime.clock),
        authenticate=by_key(runtime.database, runtime.clock),
        housekeeper=ServiceHousekeeper(runtime),
        audit_tally=tally,
        request_rates=runtime.request_rates,
        loop_time=loop_time,
    )
    admin_app, pages = create_admin_app(services), create_operator_pages(services)
    build_routes(admin_app.router, pages.router)
    app = with_operator_pages(admin_app, pages, services)
    server = SignalFreeServer(server_config(app, settings, protocol(settings)))
    listener.listen(server.config.backlog)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="admin API")
    log.info("the admin API listens on %s", address(listener))
    counting = asyncio.create_task(tally.run(), name="counts of the audit log")
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        counting.cancel()
        await write_last_counts(tally)
