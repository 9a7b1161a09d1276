"""Keys of the service's own operators: made, listed, revoked and read. They belong to no tenant and open the admin API only.

Nothing is cached: an operator's key is looked up on each request, so that a revocation holds at once on every process.
"""

import hmac
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, Unauthenticated
from store.clock import Clock
from store.database import Database
from store.tables import OperatorKey
from tenants.key_text import (
    HASH_BYTES,
    KEY_PREFIX,
    hash_of,
    is_mistyped,
    key_text,
    new_prefix,
    new_secret,
    shown_prefix,
)
from tenants.rights import Role

_LONGEST_NOTE = 200


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator that a request acts as. ``name``: first part of the key, or user and host of a command on the database.

    ``is_browser``: the request comes from a page, by the cookie of a browser that has logged in with the key.
    """

    name: str
    key_id: int | None = None
    is_browser: bool = False

    @property
    def role(self) -> Role:
        """Role that no tenant's key has."""
        return Role.OPERATOR


@dataclass(frozen=True, slots=True)
class NewOperatorKey:
    """A new key. ``secret`` is the whole text, shown only now; ``prefix`` names the key to people."""

    id: int
    prefix: str
    secret: str


async def create_operator_key(
    transaction: AsyncSession, *, note: str, expires_at: datetime | None, clock: Clock
) -> NewOperatorKey:
    """Make a key of the role ``operator``. Raises ``InvalidRequest`` for an end that is over."""
    now = clock()
    if expires_at is not None and expires_at <= now:
        raise InvalidRequest(f"expires_at {expires_at:%Y-%m-%dT%H:%M:%SZ} is over; name a time to come")
    prefix = new_prefix()
    secret = key_text(prefix, new_secret())
    key = OperatorKey(
        prefix=prefix,
        secret_hash=hash_of(secret),
        note=note[:_LONGEST_NOTE],
        created_at=now,
        expires_at=expires_at,
    )
    transaction.add(key)
    await transaction.flush()
    return NewOperatorKey(key.id, prefix, secret)


async def list_operator_keys(session: AsyncSession) -> list[OperatorKey]:
    """Return every operator's key, oldest first, ended ones included."""
    return list(await session.scalars(select(OperatorKey).order_by(OperatorKey.id)))


async def revoke_operator_key(transaction: AsyncSession, *, key: str, clock: Clock) -> str:
    """Revoke the key with this text or shown first part at once, and return that part. Raises ``NotFound``."""
    prefix = shown_prefix(key)
    found = await transaction.scalar(select(OperatorKey.id).where(OperatorKey.prefix == prefix))
    if found is None:
        raise NotFound(f"no operator's key starts with {prefix!r}; `weft operator list` shows them")
    ended = update(OperatorKey).where(OperatorKey.id == found, OperatorKey.revoked_at.is_(None))
    await transaction.execute(ended.values(revoked_at=clock()))
    return prefix


async def authenticate_operator(database: Database, secret: str | None, clock: Clock) -> Operator:
    """Return the operator whose live key ``secret`` is. Raises ``Unauthenticated``, with one message for every cause."""
    if not secret or not secret.startswith(KEY_PREFIX) or is_mistyped(secret):
        raise _refusal()
    async with database.read() as session:
        row = await session.scalar(select(OperatorKey).where(OperatorKey.prefix == shown_prefix(secret)))
    now = clock()
    stored = bytes(HASH_BYTES) if row is None else row.secret_hash
    if not hmac.compare_digest(stored, hash_of(secret)) or row is None:
        raise _refusal()
    check_live_operator(row, now)
    await _note_use(database, row, now)
    return Operator(row.prefix, row.id)


def check_live_operator(row: OperatorKey | None, now: datetime) -> None:
    """Raise ``Unauthenticated`` for the row of a key that was revoked or has expired, and for None."""
    if row is None or row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        raise _refusal()


async def _note_use(database: Database, row: OperatorKey, now: datetime) -> None:
    """Write the minute of the use, once a minute."""
    minute = now.replace(second=0, microsecond=0)
    if row.last_used_at is not None and row.last_used_at >= minute:
        return
    is_older = or_(OperatorKey.last_used_at.is_(None), OperatorKey.last_used_at < minute)
    async with database.write_one() as session:
        used = update(OperatorKey).where(OperatorKey.id == row.id, is_older).values(last_used_at=minute)
        await session.execute(used.execution_options(synchronize_session=False))


def _refusal() -> Unauthenticated:
    return Unauthenticated(
        "missing, unknown, expired or revoked operator's key; make one with `weft operator create` on the service's machine"
    )
