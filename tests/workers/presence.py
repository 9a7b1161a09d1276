"""The service's presence in tests whose clock makes leaps."""

from datetime import UTC, datetime

from sqlalchemy import update

from ledger.runtime import Runtime
from store.tables import ServicePresence
from workers.housekeeping.presence import PresenceNotes


async def be_present(runtime: Runtime) -> None:
    """Have the service be there for its clients now, and have been there since long ago."""
    await PresenceNotes(runtime).note()
    async with runtime.database.write() as transaction:
        await transaction.execute(update(ServicePresence).values(back_at=datetime(2000, 1, 1, tzinfo=UTC)))
