"""Names of what usage is told apart by: the keys of a tenant, and the metadata of its sessions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.ids import TenantId
from store.tables import ApiKey, Session

_AT_ONCE = 500
"""Sessions that one query names."""


@dataclass(frozen=True, slots=True)
class KeyName:
    """The part of a key that is no secret, and its purpose."""

    prefix: str
    note: str


async def key_names(session: AsyncSession, tenant: TenantId) -> dict[int, KeyName]:
    """Return the names of the tenant's keys, revoked ones too, by their numbers."""
    rows = await session.execute(select(ApiKey.id, ApiKey.prefix, ApiKey.note).where(ApiKey.tenant_id == tenant))
    return {row.id: KeyName(row.prefix, row.note) for row in rows}


async def metadata_of_sessions(
    session: AsyncSession, tenant: TenantId, ids: Collection[str]
) -> dict[str, dict[str, Any] | None]:
    """Return the metadata of each of the sessions that is not forgotten: any JSON, as it was sent."""
    found: dict[str, dict[str, Any] | None] = {}
    wanted: Sequence[str] = sorted(ids)
    for begin in range(0, len(wanted), _AT_ONCE):
        some = wanted[begin : begin + _AT_ONCE]
        query = select(Session.id, Session.user_metadata).where(Session.tenant_id == tenant, Session.id.in_(some))
        found |= {row.id: row.user_metadata for row in await session.execute(query)}
    return found
