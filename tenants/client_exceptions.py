"""Exceptions that ended clients' scripts: the last ones of each session, in the sessions' projects."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.client_exceptions import MOST_OF_SESSION, ToldExceptions
from contracts.ids import TenantId
from store.inserts import insert_unless_present
from store.tables import ClientException, Session
from tenants.limits import Counted, hold_count
from tenants.reach import Owner, tenant_of, within
from tenants.rights import Principal
from tenants.sessions import acted_on

MOST_OF_TENANT = 1000
"""Exceptions that are kept of one tenant: 20 MB at most."""


async def record_exceptions(transaction: AsyncSession, caller: Principal, told: ToldExceptions, now: datetime) -> int:
    """Record the exceptions of the caller's session, and forget the oldest; return how many are new.

    Exceptions of a session on which the caller may not act are dropped: clients without one send some, too.
    """
    tenant = caller.tenant
    await hold_count(transaction, Counted.CLIENT_EXCEPTIONS, [tenant])
    own = select(Session.id).where(Session.id == told.session_id, *acted_on(caller))
    if await transaction.scalar(own) is None:
        return 0
    recorded = 0
    for one in told.exceptions:
        row = {"tenant_id": tenant, "session_id": told.session_id, "event_id": one.event_id, "at": now}
        texts = {"error_type": one.error_type, "message": one.message, "traceback": one.traceback}
        added = insert_unless_present(transaction, ClientException).values(row | texts).returning(ClientException.id)
        recorded += await transaction.scalar(added) is not None
    if recorded:
        await _forget_oldest(transaction, tenant, told.session_id)
    return recorded


async def _forget_oldest(transaction: AsyncSession, tenant: TenantId, session_id: str) -> None:
    of_session = ClientException.session_id == session_id
    of_tenant = ClientException.tenant_id == tenant
    for which, most in ((of_session, MOST_OF_SESSION), (of_tenant, MOST_OF_TENANT)):
        newest = select(ClientException.id).where(which).order_by(ClientException.id.desc())
        first = await transaction.scalar(newest.offset(most).limit(1))
        if first is not None:
            gone = delete(ClientException).where(which, ClientException.id <= first)
            await transaction.execute(gone.execution_options(synchronize_session=False))


async def list_exceptions(
    session: AsyncSession, owner: Owner, *, session_id: str | None, after: int | None, most: int
) -> Sequence[ClientException]:
    """Return the owner's exceptions, newest first, of one session if it is given, before the row ``after``."""
    query = select(ClientException).where(
        ClientException.tenant_id == tenant_of(owner), *within(owner, ClientException.session_id)
    )
    if session_id is not None:
        query = query.where(ClientException.session_id == session_id)
    if after is not None:
        query = query.where(ClientException.id < after)
    return (await session.scalars(query.order_by(ClientException.id.desc()).limit(most))).all()
