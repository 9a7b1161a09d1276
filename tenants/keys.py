"""Tenants and their API keys: creates, lists, rotates and revokes them. A key is shown once and stored as its hash."""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_network
from uuid import uuid4

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, SequenceConflict
from contracts.ids import TenantId
from store.clock import Clock
from store.tables import ApiKey, Tenant
from tenants.key_reader import CLIENT_LIFETIME, CLIENT_TOKEN, rights_of
from tenants.key_text import hash_of, key_text, new_prefix, new_secret, shown_prefix
from tenants.rights import TENANT_ROLES, KeyRights
from tenants.signed_tokens import TokenSigner

LONGEST_GRACE = timedelta(days=30)
"""Longest time for which a rotated key goes on."""
_MOST_VALUES = 50
"""Most values of one bound of a key."""
_LONGEST_NOTE = 200


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. ``secret`` is the whole ``tml-…`` string, shown only now; ``prefix`` names the key to people."""

    id: int
    prefix: str
    secret: str


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A key that was revoked: its number, and the part of it that is no secret."""

    id: int
    prefix: str
    tenant: TenantId


@dataclass(frozen=True, slots=True)
class Repeatable:
    """Request that makes a key, by the names that are the same in a repeat of it.

    The key's secret is derived from them, so that a repeat returns it although it is stored nowhere.
    """

    signer: TokenSigner
    names: tuple[str, ...]

    @property
    def id(self) -> str:
        """Id under which the key's row is found again."""
        return hashlib.sha256("\0".join(self.names).encode()).hexdigest()

    @property
    def secret(self) -> bytes:
        """Secret of the key."""
        return self.signer.derived("key", *self.names)


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


async def create_key(
    transaction: AsyncSession,
    *,
    tenant: TenantId,
    note: str,
    clock: Clock,
    rights: KeyRights | None = None,
    repeatable: Repeatable | None = None,
) -> NewKey:
    """Create an API key for ``tenant``, a member's without bounds if no rights are given.

    A repeat of a ``repeatable`` request returns the first one's key. Raises ``InvalidRequest`` for bounds that make no sense,
    ``SequenceConflict`` for a repeat that asks for another key.
    """
    rights = rights or KeyRights()
    check_rights(rights, clock())
    if repeatable is not None and (made := await _made_by(transaction, tenant, repeatable)) is not None:
        if rights_of(made) != rights or made.note != note[:_LONGEST_NOTE]:
            raise SequenceConflict("this Idempotency-Key has made a key with other rights; send another one")
        return NewKey(made.id, made.prefix, key_text(made.prefix, repeatable.secret))
    prefix = new_prefix()
    secret = key_text(prefix, new_secret() if repeatable is None else repeatable.secret)
    key = ApiKey(
        tenant_id=tenant,
        prefix=prefix,
        secret_hash=hash_of(secret),
        note=note[:_LONGEST_NOTE],
        created_at=clock(),
        made_by=None if repeatable is None else repeatable.id,
        role=rights.role,
        scopes=_list(rights.scopes),
        projects=_list(rights.projects),
        expires_at=rights.expires_at,
        base_models=_list(rights.base_models),
        max_rank=rights.max_rank,
        networks=None if rights.networks is None else list(rights.networks),
    )
    transaction.add(key)
    await transaction.flush()
    return NewKey(key.id, prefix, secret)


def check_rights(rights: KeyRights, now: datetime) -> None:
    """Raise ``InvalidRequest`` for a role that no tenant's key has, and for bounds that make no sense."""
    if rights.role not in TENANT_ROLES:
        raise InvalidRequest(f"role {rights.role} is the service's own; choose one of {', '.join(TENANT_ROLES)}")
    if rights.expires_at is not None and rights.expires_at <= now:
        raise InvalidRequest(f"expires_at {rights.expires_at:%Y-%m-%dT%H:%M:%SZ} is over; name a time to come")
    if rights.max_rank is not None and rights.max_rank < 1:
        raise InvalidRequest(f"max_rank must be 1 or more; got {rights.max_rank}")
    for name in ("scopes", "projects", "base_models", "networks"):
        values = getattr(rights, name)
        if values is not None and not 0 < len(values) <= _MOST_VALUES:
            raise InvalidRequest(f"{name} must name 1 to {_MOST_VALUES} values, or be left out; got {len(values)}")
    for network in rights.networks or ():
        try:
            ip_network(network)
        except ValueError as error:
            raise InvalidRequest(f"networks: {error}; write it as 10.0.0.0/8") from None


async def rotate_key(
    transaction: AsyncSession, key: ApiKey, *, grace: timedelta, clock: Clock, repeatable: Repeatable | None = None
) -> NewKey:
    """Make a key with the rights of ``key``, which ends after ``grace``. A repeat returns the first one's key.

    Raises ``InvalidRequest`` for a key that has ended, and for too long a grace.
    """
    tenant = TenantId(key.tenant_id)
    if repeatable is not None and (made := await _made_by(transaction, tenant, repeatable)) is not None:
        return NewKey(made.id, made.prefix, key_text(made.prefix, repeatable.secret))
    if not timedelta() <= grace <= LONGEST_GRACE:
        raise InvalidRequest(f"grace must be 0 to {LONGEST_GRACE.days} days")
    now = clock()
    if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
        raise InvalidRequest(f"key {key.prefix} has ended; make a new one")
    new = await create_key(
        transaction, tenant=tenant, note=key.note, clock=clock, rights=rights_of(key), repeatable=repeatable
    )
    ends = now + grace
    key.expires_at = ends if key.expires_at is None else min(key.expires_at, ends)
    await transaction.flush()
    return new


async def find_key(session: AsyncSession, tenant: TenantId, key_id: int) -> ApiKey:
    """Return the tenant's key of that number, locked until the transaction ends. Raises ``NotFound``."""
    query = select(ApiKey).where(ApiKey.id == key_id, ApiKey.tenant_id == tenant).with_for_update()
    found = await session.scalar(query)
    if found is None:
        raise NotFound(f"no key {key_id}; GET /api/weft/v1/keys lists them")
    return found


async def named_key(session: AsyncSession, key: str) -> ApiKey:
    """Return the key with this text or shown first part, of whichever tenant. Raises ``NotFound``."""
    shown = shown_prefix(key)
    found = await session.scalar(select(ApiKey).where(ApiKey.prefix == shown).with_for_update())
    if found is None:
        raise NotFound(f"no key starts with {shown!r}; `weft key list` shows them")
    return found


async def _made_by(session: AsyncSession, tenant: TenantId, repeatable: Repeatable) -> ApiKey | None:
    query = select(ApiKey).where(ApiKey.made_by == repeatable.id, ApiKey.tenant_id == tenant)
    found: ApiKey | None = await session.scalar(query)
    return found


def _list(values: frozenset[str] | None) -> list[str] | None:
    return None if values is None else sorted(values)


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
    found = await named_key(transaction, prefix)
    await transaction.execute(
        update(ApiKey).where(ApiKey.id == found.id, ApiKey.revoked_at.is_(None)).values(revoked_at=clock())
    )
    return RevokedKey(found.id, found.prefix, TenantId(found.tenant_id))


async def keys_revoked_since(session: AsyncSession, since: datetime) -> set[int]:
    """Return the numbers of all tenants' keys that were revoked after ``since``."""
    return set(await session.scalars(select(ApiKey.id).where(ApiKey.revoked_at > since)))


def client_token(signer: TokenSigner, key: ApiKey, tenant: Tenant) -> str:
    """Return a token that stands for the key for an hour, or until the key is revoked.

    ``sub`` and ``org_id`` are what the SDK's ``whoami`` shows.
    """
    claims = {"iss": "weft", "key": key.prefix, "sub": f"tml:key:{key.prefix}", "org_id": tenant.name}
    return signer.sign(claims, purpose=CLIENT_TOKEN, lifetime=CLIENT_LIFETIME)
