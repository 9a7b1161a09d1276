"""API keys of tenants: creates, lists, rotates and revokes them. A key is shown once and stored as its hash."""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import ip_network

from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, SequenceConflict
from contracts.ids import TenantId
from contracts.rate_lines import RateScope
from store.clock import Clock
from store.tables import ApiKey, LoginCode, Tenant, WebSession
from tenants.key_reader import CLIENT_LIFETIME, CLIENT_TOKEN, columns_of, rights_of
from tenants.key_text import hash_of, key_text, new_prefix, new_secret, shown_prefix
from tenants.limits import MOST, Counted, Limits, hold_count, limits_of
from tenants.rate_lines import forget_lines_of_keys, set_line_paces
from tenants.rates import RATE_LIMITS
from tenants.request_rates import REQUEST_RATE
from tenants.rights import SCOPES_OF_ROLES, TENANT_ROLES, KeyRights
from tenants.signed_tokens import TokenSigner
from tenants.suspensions import check_stays

KEY_LIMITS = (*RATE_LIMITS, REQUEST_RATE)
"""Limits that a key may have of its own, named as its tenant's."""
LONGEST_GRACE = timedelta(days=30)
"""Longest time for which a rotated key goes on."""
_MOST_VALUES = 50
"""Most values of one bound of a key."""
_MOST_VALUE_BYTES = 8192
"""Most UTF-8 of all values that bound a key: lists show them for each of a tenant's keys."""
_VALUES = ("projects", "base_models", "networks")
_LONGEST_NOTE = 200
MOST_KEYS = 2000
"""Most keys of one tenant, ended ones included. Those that ended make room for new ones."""
_OPERATORS_KEYS = 100
"""Keys beyond these that operators may make for the tenant: it cannot keep them from looking by making keys itself."""
_KEPT_ENDED = timedelta(days=1)
"""Time for which an ended key is kept at least: what it has begun ends by its row."""
_FORGOTTEN_AT_ONCE = 100
_PAGE = 50
"""Keys that are read at once where all of a tenant are wanted."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. ``secret`` is the whole ``tml-…`` string, shown only now; ``prefix`` names the key to people.

    ``is_repeat``: an earlier request has made it.
    """

    id: int
    prefix: str
    secret: str
    is_repeat: bool = False


@dataclass(frozen=True, slots=True)
class RevokedKey:
    """A key that was revoked: its number, and the part of it that is no secret. ``was_live``: it was not revoked before."""

    id: int
    prefix: str
    tenant: TenantId
    was_live: bool


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


async def create_key(
    transaction: AsyncSession,
    *,
    tenant: TenantId,
    note: str,
    clock: Clock,
    rights: KeyRights | None = None,
    repeatable: Repeatable | None = None,
    defaults: Limits | None = None,
    payer: int | None = None,
) -> NewKey:
    """Create an API key for ``tenant``, a member's without bounds if no rights are given.

    A repeat of a ``repeatable`` request returns the first one's key. ``defaults`` are the limits of a tenant without own values;
    without them the key is the service's to make, and its number of live keys is not bounded. ``payer``: key whose budgets and
    rates the new one takes.

    Raises ``InvalidRequest`` for bounds that make no sense, for a tenant that is to be deleted or has too many keys,
    ``SequenceConflict`` for a repeat that asks for another key.
    """
    rights = rights or KeyRights()
    check_rights(rights, clock())
    if repeatable is not None and (made := await _made_by(transaction, tenant, repeatable)) is not None:
        if rights_of(made) != rights or made.note != note[:_LONGEST_NOTE]:
            raise SequenceConflict("this Idempotency-Key has made a key with other rights; send another one")
        return _repeated(made, repeatable)
    check_stays(await transaction.get_one(Tenant, tenant, populate_existing=True))
    if defaults is not None:
        await _check_room(transaction, tenant, defaults, clock())
    await _make_room(transaction, tenant, clock(), MOST_KEYS if defaults is not None else MOST_KEYS + _OPERATORS_KEYS)
    prefix = new_prefix()
    secret = key_text(prefix, new_secret() if repeatable is None else repeatable.secret)
    key = ApiKey(
        tenant_id=tenant,
        prefix=prefix,
        secret_hash=hash_of(secret),
        note=note[:_LONGEST_NOTE],
        created_at=clock(),
        made_by=None if repeatable is None else repeatable.id,
        budget_key=payer,
        **columns_of(rights),
    )
    transaction.add(key)
    await transaction.flush()
    if rights.limits and payer is None:
        await set_line_paces(transaction, tenant, RateScope.KEY, str(key.id), rights.limits, clock())
    return NewKey(key.id, prefix, secret)


async def _make_room(transaction: AsyncSession, tenant: TenantId, now: datetime, most: int) -> None:
    """Forget keys that ended first, if the tenant has ``most``, which is as many as are kept. Raises ``InvalidRequest``."""
    kept = await transaction.scalar(select(func.count()).select_from(ApiKey).where(ApiKey.tenant_id == tenant)) or 0
    if kept < most:
        return
    if not await forget_ended_keys(transaction, now - _KEPT_ENDED, ApiKey.tenant_id == tenant, most=_FORGOTTEN_AT_ONCE):
        raise InvalidRequest(
            f"{kept} keys of yours are kept, which is the most; revoke some, and a day later they make room for new ones"
        )


async def forget_ended_keys(
    transaction: AsyncSession, ended_before: datetime, *which: ColumnElement[bool], most: int
) -> int:
    """Delete at most ``most`` keys that ended before ``ended_before``, and no browser has; return how many."""
    # SQLite would give the newest row's number to the next key.
    newest = select(func.max(ApiKey.id)).scalar_subquery()
    ended = (
        select(ApiKey.id)
        .where(
            *which,
            or_(ApiKey.revoked_at <= ended_before, ApiKey.expires_at <= ended_before),
            ApiKey.id < newest,
            ~exists().where(WebSession.key_id == ApiKey.id),
            ~exists().where(LoginCode.key_id == ApiKey.id),
        )
        .order_by(ApiKey.id)
        .limit(most)
    )
    gone = delete(ApiKey).where(ApiKey.id.in_(ended)).returning(func.coalesce(ApiKey.budget_key, ApiKey.id))
    payers = list(await transaction.scalars(gone.execution_options(synchronize_session=False)))
    await forget_lines_of_keys(transaction, set(payers))
    return len(payers)


def check_key_limits(limits: Mapping[str, int | None]) -> None:
    """Raise ``InvalidRequest`` for a limit that keys do not have, and for a value out of range."""
    for name, value in limits.items():
        if name not in KEY_LIMITS:
            raise InvalidRequest(f"no limit of keys is named {name[:50]!r}; those are {', '.join(KEY_LIMITS)}")
        if value is not None and not 1 <= value <= MOST:
            raise InvalidRequest(f"{name} must be 1 to {MOST}, or none; got {value}")


def check_rights(rights: KeyRights, now: datetime) -> None:
    """Raise ``InvalidRequest`` for a role that no tenant's key has, and for bounds that make no sense or leave nothing."""
    if rights.role not in TENANT_ROLES:
        raise InvalidRequest(
            f"role {rights.role} is none that a key may be given; choose one of {', '.join(TENANT_ROLES)}"
        )
    if rights.scopes and not rights.effective_scopes:
        raise InvalidRequest(
            f"scopes: none is of role {rights.role}, whose scopes are {', '.join(sorted(SCOPES_OF_ROLES[rights.role]))}; name "
            "one of those, or a role that has the scope"
        )
    if rights.expires_at is not None and rights.expires_at <= now:
        raise InvalidRequest(f"expires_at {rights.expires_at:%Y-%m-%dT%H:%M:%SZ} is over; name a time to come")
    if rights.max_rank is not None and rights.max_rank < 1:
        raise InvalidRequest(f"max_rank must be 1 or more; got {rights.max_rank}")
    check_key_limits(rights.limits or {})
    for name in ("scopes", *_VALUES):
        values = getattr(rights, name)
        if values is not None and not 0 < len(values) <= _MOST_VALUES:
            raise InvalidRequest(f"{name} must name 1 to {_MOST_VALUES} values, or be left out; got {len(values)}")
    size = sum(len(value.encode()) for name in _VALUES for value in getattr(rights, name) or ())
    if size > _MOST_VALUE_BYTES:
        raise InvalidRequest(
            f"{', '.join(_VALUES[:-1])} and {_VALUES[-1]} of a key may have {_MOST_VALUE_BYTES} bytes together; got {size}. "
            "Name fewer, or leave out a list that need not bound the key"
        )
    for network in rights.networks or ():
        try:
            ip_network(network)
        except ValueError as error:
            raise InvalidRequest(f"networks: {error}; write it as 10.0.0.0/8") from None


async def rotate_key(
    transaction: AsyncSession,
    key: ApiKey,
    *,
    grace: timedelta,
    clock: Clock,
    repeatable: Repeatable | None = None,
    defaults: Limits | None = None,
) -> NewKey:
    """Make a key with the rights of ``key``, which ends after ``grace``. A repeat returns the first one's key.

    Until then both count to the tenant's limit. Raises ``InvalidRequest`` for a key that has ended, for too long a grace, and as
    ``create_key``.
    """
    tenant = TenantId(key.tenant_id)
    if repeatable is not None and (made := await _made_by(transaction, tenant, repeatable)) is not None:
        return _repeated(made, repeatable)
    if not timedelta() <= grace <= LONGEST_GRACE:
        raise InvalidRequest(f"grace must be 0 to {LONGEST_GRACE.days} days")
    now = clock()
    if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
        raise InvalidRequest(f"key {key.prefix} has ended; make a new one")
    rights, ends = rights_of(key), now + grace
    key.expires_at = ends if key.expires_at is None else min(key.expires_at, ends)
    await transaction.flush()
    return await create_key(
        transaction,
        tenant=tenant,
        note=key.note,
        clock=clock,
        rights=rights,
        repeatable=repeatable,
        defaults=defaults,
        payer=key.budget_key or key.id,
    )


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Keys whose rates were set together: those of each before, by its shown prefix, and those of all now."""

    before: Mapping[str, Mapping[str, int]]
    limits: Mapping[str, int]


async def sharing_keys(session: AsyncSession, key: ApiKey, now: datetime) -> Sequence[ApiKey]:
    """Return the key and the others that have not ended and share its rates."""
    query = select(ApiKey).where(*_shares(key), or_(ApiKey.id == key.id, _lives(now))).order_by(ApiKey.id)
    return (await session.scalars(query)).all()


def _shares(key: ApiKey) -> tuple[ColumnElement[bool], ...]:
    payer = key.budget_key or key.id
    return ApiKey.tenant_id == key.tenant_id, (ApiKey.id == payer) | (ApiKey.budget_key == payer)


async def set_key_limits(
    transaction: AsyncSession, key: ApiKey, limits: Mapping[str, int | None], clock: Clock
) -> KeyChange:
    """Give a key, and those with which it shares them, rates of its own, None for none. They hold from its next request on.

    Work that waits goes on at the new rate. Raises ``InvalidRequest`` for a limit that is none of keys.
    """
    check_key_limits(limits)
    payer, now = key.budget_key or key.id, clock()
    before = {one.prefix: dict(one.limits or {}) for one in await sharing_keys(transaction, key, now)}
    after = {name: value for name, value in {**before[key.prefix], **limits}.items() if value is not None}
    await transaction.execute(update(ApiKey).where(*_shares(key)).values(limits=after or None))
    await set_line_paces(transaction, TenantId(key.tenant_id), RateScope.KEY, str(payer), after, now)
    changed = {prefix: own for prefix, own in before.items() if own != after or prefix == key.prefix}
    return KeyChange(changed, after)


async def live_keys(session: AsyncSession, tenant: TenantId, now: datetime) -> int:
    """Return how many keys of the tenant's own have not ended. Keys of operators' looks are none of them."""
    query = select(func.count()).where(ApiKey.tenant_id == tenant, ApiKey.operator.is_(None), _lives(now))
    return (await session.scalars(query)).one()


async def limits_of_keys(session: AsyncSession, tenant: TenantId, now: datetime) -> dict[int, Mapping[str, int]]:
    """Return the limits of the tenant's keys that have not ended, by the first of those that share them."""
    payer = func.coalesce(ApiKey.budget_key, ApiKey.id).label("payer")
    query = select(payer, ApiKey.limits).where(ApiKey.tenant_id == tenant, ApiKey.limits.is_not(None), _lives(now))
    return {row.payer: row.limits for row in await session.execute(query)}


def _lives(now: datetime) -> ColumnElement[bool]:
    return and_(ApiKey.revoked_at.is_(None), or_(ApiKey.expires_at.is_(None), ApiKey.expires_at > now))


async def _check_room(transaction: AsyncSession, tenant: TenantId, defaults: Limits, now: datetime) -> None:
    """Raise ``InvalidRequest`` unless the tenant may have one more key. Processes that ask at once come one after the other."""
    await hold_count(transaction, Counted.KEYS, [tenant])
    used, most = await live_keys(transaction, tenant, now), (await limits_of(transaction, tenant, defaults)).keys
    if used >= most:
        raise InvalidRequest(
            f"you have {used} keys that have not ended, and your limit is {most} (keys); revoke one that is not used, or rotate "
            "another one without a grace"
        )


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


def _repeated(made: ApiKey, repeatable: Repeatable) -> NewKey:
    return NewKey(made.id, made.prefix, key_text(made.prefix, repeatable.secret), is_repeat=True)


async def pages_of_keys(session: AsyncSession, tenant: TenantId) -> AsyncIterator[Sequence[ApiKey]]:
    """Iterate over pages of the tenant's keys, oldest first, ended ones included."""
    last = 0
    while True:
        page = select(ApiKey).where(ApiKey.tenant_id == tenant, ApiKey.id > last).order_by(ApiKey.id).limit(_PAGE)
        rows = (await session.scalars(page)).all()
        yield rows
        if len(rows) < _PAGE:
            return
        last = rows[-1].id


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

    Revoking again does nothing. What the key has begun is ended by ``ledger.ended_keys``.
    """
    found = await named_key(transaction, prefix)
    was_live = found.revoked_at is None
    await transaction.execute(
        update(ApiKey).where(ApiKey.id == found.id, ApiKey.revoked_at.is_(None)).values(revoked_at=clock())
    )
    return RevokedKey(found.id, found.prefix, TenantId(found.tenant_id), was_live)


async def keys_ended_between(session: AsyncSession, since: datetime, now: datetime) -> dict[int, TenantId]:
    """Return the numbers of keys that were revoked after ``since``, or expired after it and by ``now``, with their tenants."""
    has_expired = and_(ApiKey.expires_at > since, ApiKey.expires_at <= now)
    ended = select(ApiKey.id, ApiKey.tenant_id).where(or_(ApiKey.revoked_at > since, has_expired))
    return {row.id: TenantId(row.tenant_id) for row in await session.execute(ended)}


def client_token(signer: TokenSigner, key: ApiKey, tenant: Tenant) -> str:
    """Return a token that stands for the key for an hour, or until the key is revoked.

    ``sub`` and ``org_id`` are what the SDK's ``whoami`` shows.
    """
    claims = {"iss": "weft", "key": key.prefix, "sub": f"tml:key:{key.prefix}", "org_id": tenant.name}
    return signer.sign(claims, purpose=CLIENT_TOKEN, lifetime=CLIENT_LIFETIME)
