"""Tenants and their API keys: creates, lists, revokes and checks them.

A key is shown once and stored as its SHA-256. A random 256-bit secret needs no slow hash.
"""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, Unauthenticated
from contracts.ids import TenantId
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database
from store.tables import ApiKey, Tenant
from tenants.signed_tokens import TOKEN_PREFIX, TokenSigner

KEY_PREFIX = "tml-"
"""Start of every key; the SDK refuses others."""
_CLIENT = "client"
"""Purpose of tokens that stand for a key."""
_CLIENT_LIFETIME = timedelta(hours=1)
_PREFIX_BYTES = 6
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. ``secret`` is the whole ``tml-…`` string, shown only now; ``prefix`` names the key to people."""

    prefix: str
    secret: str


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A key that was revoked: its number, and the part of it that is no secret."""

    id: int
    prefix: str
    tenant: TenantId


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """A live key's tenant, and the key's number."""

    tenant: TenantId
    key_id: int


async def create_tenant(transaction: AsyncSession, *, name: str, clock: Clock) -> TenantId:
    """Create a tenant. Raises ``InvalidRequest`` when the name is empty, too long or taken."""
    if not 0 < len(name) <= 100:
        raise InvalidRequest("tenant name must have 1 to 100 characters")
    if await transaction.scalar(select(Tenant.id).where(Tenant.name == name)):
        raise InvalidRequest(f"a tenant named {name!r} exists already; choose another name")
    tenant = Tenant(id=uuid4().hex, name=name, share=1.0, created_at=clock())
    transaction.add(tenant)
    await transaction.flush()
    return TenantId(tenant.id)


async def find_tenant(session: AsyncSession, *, name: str) -> TenantId:
    """Return the tenant of that name. Raises ``NotFound``."""
    found = await session.scalar(select(Tenant.id).where(Tenant.name == name))
    if found is None:
        raise NotFound(f"no tenant is named {name!r}; `weft tenant list` shows them")
    return TenantId(found)


async def tenant_name(session: AsyncSession, tenant: TenantId) -> str:
    """Return the tenant's name."""
    return (await session.scalars(select(Tenant.name).where(Tenant.id == tenant))).one()


async def list_tenants(session: AsyncSession) -> list[Tenant]:
    """Return every tenant, oldest first."""
    return list(await session.scalars(select(Tenant).order_by(Tenant.created_at)))


async def create_key(transaction: AsyncSession, *, tenant: TenantId, note: str, clock: Clock) -> NewKey:
    """Create an API key for ``tenant``."""
    prefix = KEY_PREFIX + secrets.token_hex(_PREFIX_BYTES)
    secret = f"{prefix}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    transaction.add(
        ApiKey(tenant_id=tenant, prefix=prefix, secret_hash=_hash(secret), note=note[:200], created_at=clock())
    )
    await transaction.flush()
    return NewKey(prefix, secret)


async def list_keys(session: AsyncSession, *, tenant: TenantId) -> list[ApiKey]:
    """Return the keys of ``tenant``, oldest first, revoked ones included."""
    return list(await session.scalars(select(ApiKey).where(ApiKey.tenant_id == tenant).order_by(ApiKey.id)))


async def describe_key(session: AsyncSession, tenant: TenantId, key_id: int | None) -> tuple[ApiKey, Tenant]:
    """Return the row of a key and its tenant. Raises ``NotFound`` unless the key is the tenant's."""
    row = (
        await session.execute(
            select(ApiKey, Tenant)
            .join(Tenant, Tenant.id == ApiKey.tenant_id)
            .where(ApiKey.id == key_id, ApiKey.tenant_id == tenant)
        )
    ).one_or_none()
    if row is None:
        raise NotFound("no such key")
    return row[0], row[1]


async def revoke_key(transaction: AsyncSession, *, prefix: str, clock: Clock) -> RevokedKey:
    """Revoke a key at once, given its shown prefix or its whole secret. Raises ``NotFound``.

    Revoking again does nothing. What the key has begun is ended by ``ledger.revocations``.
    """
    shown = shown_prefix(prefix)
    found = await transaction.scalar(select(ApiKey).where(ApiKey.prefix == shown))
    if found is None:
        raise NotFound(f"no key starts with {shown!r}; `weft key list` shows them")
    await transaction.execute(
        update(ApiKey).where(ApiKey.id == found.id, ApiKey.revoked_at.is_(None)).values(revoked_at=clock())
    )
    return RevokedKey(found.id, shown, TenantId(found.tenant_id))


async def keys_revoked_since(session: AsyncSession, since: datetime) -> set[int]:
    """Return the numbers of all tenants' keys that were revoked after ``since``."""
    return set(await session.scalars(select(ApiKey.id).where(ApiKey.revoked_at > since)))


# Built once: every request begins with this query.
_BY_PREFIX = select(
    ApiKey.__table__.c.id,
    ApiKey.__table__.c.prefix,
    ApiKey.__table__.c.tenant_id,
    ApiKey.__table__.c.secret_hash,
    ApiKey.__table__.c.revoked_at,
).where(ApiKey.__table__.c.prefix.in_(bindparam("prefixes", expanding=True)))


class KeyReader:
    """Authenticates requests. Keys are not cached, so a revoked key is refused at once."""

    def __init__(self, database: Database, signer: TokenSigner) -> None:
        self._database = database
        self._signer = signer
        self._rows: Batcher[str, Any] = Batcher(self._read)

    async def authenticate(self, secret: str | None) -> KeyHolder:
        """Return the holder of the live key ``secret``, which may be a token that stands for one (``client_token``).

        Raises ``Unauthenticated``, with one message for every cause.
        """
        refusal = _refusal()
        if secret and secret.startswith(TOKEN_PREFIX):
            claims = self._signer.claims(secret, purpose=_CLIENT)
            if claims is None:
                raise refusal
            return await self.holder(claims["key"])
        if not secret or not secret.startswith(KEY_PREFIX):
            raise refusal
        row = await self._rows.ask(shown_prefix(secret))
        stored = row.secret_hash if row is not None else bytes(hashlib.sha256().digest_size)
        matches = hmac.compare_digest(stored, _hash(secret))
        if row is None or not matches or row.revoked_at is not None:
            raise refusal
        return KeyHolder(TenantId(row.tenant_id), row.id)

    async def holder(self, prefix: str) -> KeyHolder:
        """Return the holder of the live key with that shown prefix, which a signed token names. Raises ``Unauthenticated``."""
        row = await self._rows.ask(prefix)
        if row is None or row.revoked_at is not None:
            raise _refusal()
        return KeyHolder(TenantId(row.tenant_id), row.id)

    async def _read(self, prefixes: Sequence[str]) -> list[Any]:
        async with self._database.read() as session:
            rows = await session.execute(_BY_PREFIX, {"prefixes": few_lengths(sorted(set(prefixes)))})
            found: dict[str, Any] = {row.prefix: row for row in rows}
        return [found.get(prefix) for prefix in prefixes]


def _refusal() -> Unauthenticated:
    return Unauthenticated("missing, unknown or revoked API key; send a live tml-… key as X-API-Key")


def client_token(signer: TokenSigner, key: ApiKey, tenant: Tenant) -> str:
    """Return a token that stands for the key for an hour, or until the key is revoked.

    ``sub`` and ``org_id`` are what the SDK's ``whoami`` shows.
    """
    claims = {"iss": "weft", "key": key.prefix, "sub": f"tml:key:{key.prefix}", "org_id": tenant.name}
    return signer.sign(claims, purpose=_CLIENT, lifetime=_CLIENT_LIFETIME)


def shown_prefix(secret: str) -> str:
    """Return the part of a key that names it to people and is no secret."""
    return secret[: len(KEY_PREFIX) + 2 * _PREFIX_BYTES]


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
