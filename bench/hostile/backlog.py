"""End of what an attack has left behind, so that the next row tells of its own attack alone."""

from contracts.errors import Cancelled
from ledger.cancellation import OfTenant
from ledger.ledger import Ledger
from ledger.payload_files import PayloadFiles
from ledger.wakeups import Wakeups
from store.clock import utc_now
from store.data_folder import DataFolder
from store.database import Database
from store.settings import Settings
from telemetry.telemetry import Telemetry
from tenants.tenant_names import find_tenant


async def cancel_backlog(database: Database, settings: Settings, tenant_name: str) -> None:
    """Cancel the tenant's pending operations, as an operator would who ends its sessions."""
    files = PayloadFiles(DataFolder(settings.data_dir))
    ledger = Ledger(database, Wakeups(), utc_now, Telemetry.of("bench", utc_now), files)
    async with database.write() as transaction:
        tenant = await find_tenant(transaction, name=tenant_name)
        await ledger.cancel(transaction, OfTenant(tenant), Cancelled("cancelled: the next attack begins"))
