"""Authentication of requests by their keys: one statement for all requests that arrive together, and nothing cached."""

import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, select

from contracts.errors import Unauthenticated
from contracts.ids import TenantId
from contracts.stored_words import known
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database
from store.tables import ApiKey, Tenant
from tenants.key_text import HASH_BYTES, KEY_PREFIX, hash_of, is_mistyped, shown_prefix
from tenants.key_uses import KeyUses
from tenants.rights import KeyRights, Principal, Role, Via, known_mode
from tenants.signed_tokens import TOKEN_PREFIX, TokenSigner

CLIENT_TOKEN = "client"
"""Purpose of tokens that stand for a key."""
CLIENT_LIFETIME = timedelta(hours=1)

_keys, _tenants = ApiKey.__table__, Tenant.__table__
KEY_COLUMNS = (
    _keys.c.id,
    _keys.c.prefix,
    _keys.c.tenant_id,
    _keys.c.secret_hash,
    _keys.c.revoked_at,
    _keys.c.role,
    _keys.c.scopes,
    _keys.c.projects,
    _keys.c.expires_at,
    _keys.c.base_models,
    _keys.c.max_rank,
    _keys.c.networks,
    _keys.c.limits,
    _keys.c.last_used_at,
    _keys.c.budget_key,
    _keys.c.operator,
    _tenants.c.suspended_at,
    _tenants.c.suspend_mode,
    _tenants.c.suspend_reason,
    _tenants.c.limits.label("tenant_limits"),
)
"""Columns of a key and its tenant that ``live_principal`` reads."""
# Built once: every request begins with this query.
_BY_PREFIX = (
    select(*KEY_COLUMNS)
    .join_from(_keys, _tenants, _tenants.c.id == _keys.c.tenant_id)
    .where(_keys.c.prefix.in_(bindparam("prefixes", expanding=True)))
)


class KeyReader:
    """Authenticates requests. Keys are not cached, so that what is changed in a key or its tenant holds at once."""

    def __init__(self, database: Database, signer: TokenSigner, clock: Clock, uses: KeyUses) -> None:
        """``uses`` notes the keys that are used."""
        self._database = database
        self._signer = signer
        self._clock = clock
        self._uses = uses
        self._rows: Batcher[str, Any] = Batcher(self._read)

    async def authenticate(self, secret: str | None, address: str | None = None) -> Principal:
        """Return the principal of the live key ``secret``, which may be a token that stands for one (``client_token``).

        ``address`` is where the request came from.

        Raises ``Unauthenticated``, with one message for every cause but that the key has expired, which its holder reads.
        """
        if secret and secret.startswith(TOKEN_PREFIX):
            claims = self._signer.claims(secret, purpose=CLIENT_TOKEN)
            if claims is None:
                raise _refusal()
            return await self.principal(claims["key"], address)
        if not secret or not secret.startswith(KEY_PREFIX) or is_mistyped(secret):
            raise _refusal()
        row = await self._rows.ask(shown_prefix(secret))
        stored = row.secret_hash if row is not None else bytes(HASH_BYTES)
        matches = hmac.compare_digest(stored, hash_of(secret))
        if row is None or not matches:
            raise _refusal()
        return self._living(row, Via.KEY, address)

    async def principal(self, prefix: str, address: str | None = None) -> Principal:
        """Return the principal of the live key with that shown prefix, which a signed token names. Raises ``Unauthenticated``."""
        row = await self._rows.ask(prefix)
        if row is None:
            raise _refusal()
        return self._living(row, Via.TOKEN, address)

    def _living(self, row: Any, via: Via, address: str | None) -> Principal:
        now = self._clock()
        principal = live_principal(row, via, address, now)
        self._uses.note(row.id, row.last_used_at, now)
        return principal

    async def _read(self, prefixes: Sequence[str]) -> list[Any]:
        async with self._database.read() as session:
            rows = await session.execute(_BY_PREFIX, {"prefixes": few_lengths(sorted(set(prefixes)))})
            found: dict[str, Any] = {row.prefix: row for row in rows}
        return [found.get(prefix) for prefix in prefixes]


def live_principal(row: Any, via: Via, address: str | None, now: datetime) -> Principal:
    """Return the principal of a row of ``KEY_COLUMNS``. Raises ``Unauthenticated`` for a revoked or expired key."""
    check_live(row, now)
    return Principal(
        tenant=TenantId(row.tenant_id),
        key_id=row.id,
        rights=rights_of(row),
        prefix=row.prefix,
        # Tenants are not told where an operator who looks at their pages is.
        address=address if row.operator is None else None,
        via=via,
        suspension=None if row.suspended_at is None else known_mode(row.suspend_mode),
        reason=row.suspend_reason,
        budget_key=row.budget_key,
        tenant_limits=row.tenant_limits,
    )


def check_live(row: Any, now: datetime) -> None:
    """Raise ``Unauthenticated`` for the row of a key that was revoked or has expired."""
    if row.revoked_at is not None:
        raise _refusal()
    if row.expires_at is not None and row.expires_at <= now:
        raise Unauthenticated(f"this API key expired at {row.expires_at:%Y-%m-%dT%H:%M:%SZ}; send another one")


def rights_of(row: Any) -> KeyRights:
    """Return the rights in a row of ``api_keys``."""
    return KeyRights(
        role=known(Role, row.role, Role.UNKNOWN),
        scopes=_set(row.scopes),
        projects=_set(row.projects),
        expires_at=row.expires_at,
        base_models=_set(row.base_models),
        max_rank=row.max_rank,
        networks=None if row.networks is None else tuple(row.networks),
        limits=row.limits,
    )


def columns_of(rights: KeyRights) -> dict[str, Any]:
    """Return the columns of ``api_keys`` that hold the rights: ``rights_of`` reads them."""
    return {
        "role": rights.role,
        "scopes": _list(rights.scopes),
        "projects": _list(rights.projects),
        "expires_at": rights.expires_at,
        "base_models": _list(rights.base_models),
        "max_rank": rights.max_rank,
        "networks": None if rights.networks is None else list(rights.networks),
        "limits": dict(rights.limits) if rights.limits else None,
    }


def _set(values: list[str] | None) -> Any:
    return None if values is None else frozenset(values)


def _list(values: frozenset[str] | None) -> list[str] | None:
    return None if values is None else sorted(values)


def _refusal() -> Unauthenticated:
    return Unauthenticated(
        "missing, unknown or revoked API key; send a live tml-… key as X-API-Key, or as a bearer token"
    )
