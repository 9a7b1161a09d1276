"""Silence of clients whose tenant was blocked: they were refused, so nothing of theirs ends or is forgotten for it.

After the block all that waits for a client has its whole time again, as after an outage of the service.
"""

from datetime import datetime

from sqlalchemy import BindParameter, ColumnElement, and_, or_, select
from sqlalchemy.orm import InstrumentedAttribute

from store.tables import Tenant
from tenants.rights import LENIENT


def were_answered(
    tenant: ColumnElement[str] | InstrumentedAttribute[str], since: datetime | BindParameter[datetime]
) -> ColumnElement[bool]:
    """Return the condition that a tenant's clients were answered all the time since then: no block was in it.

    One whose removal had begun by then counts as answered, for good: nobody will ask any more.
    """
    comes_back = or_(Tenant.delete_at.is_(None), Tenant.delete_at > since)
    is_blocked = and_(Tenant.suspended_at.is_not(None), Tenant.suspend_mode.not_in(LENIENT), comes_back)
    refused = select(Tenant.id).where(Tenant.id == tenant, or_(is_blocked, Tenant.answered_since > since))
    return ~refused.exists()


def is_blocked(tenant: Tenant) -> bool:
    """Return whether every request of the tenant is refused."""
    return tenant.suspended_at is not None and (tenant.suspend_mode or LENIENT[0]) not in LENIENT
