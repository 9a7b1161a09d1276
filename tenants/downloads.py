"""Download links to a checkpoint's files. The secret in a link replaces the API key and is valid for an hour."""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound
from contracts.ids import TenantId
from contracts.paths import CheckpointPath
from store.clock import Clock
from store.deletions import delete_some
from store.tables import ApiKey, Checkpoint, DownloadLink, Tenant
from tenants.checkpoints import find_checkpoint, path_of
from tenants.reach import Owner
from tenants.rights import LENIENT

LINK_LIFE = timedelta(hours=1)
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Link:
    """A new link. ``secret`` is shown once; ``directory`` is the checkpoint's folder, relative to the data folder."""

    secret: str
    directory: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class FollowedLink:
    """A live link's ``directory``, relative to the data folder, its checkpoint's path, its tenant, and its maker's key.

    ``prefix`` and ``role`` are the key's; None for a link from before keys were noted.
    """

    tenant: TenantId
    directory: str
    path: CheckpointPath
    key_id: int | None
    prefix: str | None
    role: str | None


async def make_link(
    transaction: AsyncSession, owner: Owner, path: CheckpointPath, clock: Clock, *, key_id: int | None = None
) -> Link:
    """Make a link to the owner's checkpoint, which ends with the key ``key_id``. Raises ``NotFound``."""
    checkpoint, _ = await find_checkpoint(transaction, owner, path, clock)
    secret, now = secrets.token_urlsafe(_SECRET_BYTES), clock()
    link = DownloadLink(
        secret_hash=_hash(secret),
        tenant_id=checkpoint.tenant_id,
        checkpoint_id=checkpoint.id,
        created_at=now,
        expires_at=now + LINK_LIFE,
        key_id=key_id,
    )
    transaction.add(link)
    await transaction.flush()
    return Link(secret, checkpoint.directory, link.expires_at)


async def follow_link(session: AsyncSession, secret: str, clock: Clock) -> FollowedLink:
    """Return what is behind the link. Raises ``NotFound`` when link or checkpoint has expired, or the key has ended.

    A blocked tenant's links lead nowhere.
    """
    now = clock()
    row = (
        await session.execute(
            select(Checkpoint, DownloadLink.tenant_id, DownloadLink.key_id, ApiKey.prefix, ApiKey.role)
            .join(DownloadLink, DownloadLink.checkpoint_id == Checkpoint.id)
            .join(Tenant, Tenant.id == DownloadLink.tenant_id)
            .outerjoin(ApiKey, ApiKey.id == DownloadLink.key_id)
            .where(
                DownloadLink.secret_hash == _hash(secret),
                DownloadLink.expires_at > now,
                ApiKey.revoked_at.is_(None),
                or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now),
                or_(Tenant.suspend_mode.is_(None), Tenant.suspend_mode.in_(LENIENT)),
            )
        )
    ).one_or_none()
    checkpoint: Checkpoint | None = None if row is None else row[0]
    if row is None or checkpoint is None or (checkpoint.expires_at is not None and checkpoint.expires_at <= now):
        raise NotFound("this link has expired, or never was; ask for another")
    return FollowedLink(
        TenantId(row.tenant_id), checkpoint.directory, path_of(checkpoint), row.key_id, row.prefix, row.role
    )


async def delete_expired_links(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete at most ``most`` expired links; return how many."""
    expired = DownloadLink.expires_at <= now
    return await delete_some(transaction, DownloadLink, expired, most=most, first=DownloadLink.expires_at)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
