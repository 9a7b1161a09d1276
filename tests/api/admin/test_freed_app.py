"""An admin API that has ended is freed: a command makes one, and a process may run many commands."""

import gc
import weakref

from api.admin.app import by_key, create_admin_app
from api.admin.services import AdminServices
from api.route_building import build_routes
from cli.housekeeper import ServiceHousekeeper
from tenants.audit_tally import AuditTally
from tenants.limits import Limits
from tenants.signed_tokens import TokenSigner
from tests.api.conftest import Service


async def test_an_ended_admin_api_is_freed(service: Service) -> None:
    runtime = service.services.runtime
    services = AdminServices(
        runtime=runtime,
        limits=Limits.of(runtime.settings),
        signer=TokenSigner(runtime.data_folder, runtime.clock),
        authenticate=by_key(runtime.database, runtime.clock),
        housekeeper=ServiceHousekeeper(runtime),
        audit_tally=AuditTally(runtime.database, runtime.clock),
        request_rates=runtime.request_rates,
    )
    app, beside = create_admin_app(services), create_admin_app(services)
    for one in (app, beside):
        build_routes(one.router)
    ended = weakref.ref(app)
    del app, one
    gc.collect()
    assert ended() is None
    assert beside.openapi()["paths"]
