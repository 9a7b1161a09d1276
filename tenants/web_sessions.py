"""Web sessions of the dashboard: a secret in a browser's cookie that stands for a key, with the key's rights.

Nothing is cached: each request reads the session together with its key and tenant, so a change of either holds at once.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import NotFound, Unauthenticated
from contracts.ids import TenantId
from store.batcher import Batcher, few_lengths
from store.clock import Clock
from store.database import Database
from store.tables import ApiKey, Tenant, WebSession
from tenants.key_reader import KEY_COLUMNS, live_principal
from tenants.key_uses import KeyUses
from tenants.rights import Principal, Via

TOKEN_BYTES = 32
MOST_SESSIONS = 20
"""Most web sessions of one key; a further one ends the oldest."""
_SEEN = timedelta(minutes=1)
_LONGEST_ADDRESS = 64
_LONGEST_AGENT = 200

_sessions, _keys, _tenants = WebSession.__table__, ApiKey.__table__, Tenant.__table__
_BY_HASH = (
    select(
        *KEY_COLUMNS,
        _tenants.c.name.label("tenant_name"),
        _sessions.c.id.label("session_id"),
        _sessions.c.token_hash,
        _sessions.c.seen_at,
        _sessions.c.expires_at.label("session_ends"),
    )
    .join_from(_sessions, _keys, _keys.c.id == _sessions.c.key_id)
    .join(_tenants, _tenants.c.id == _keys.c.tenant_id)
    .where(_sessions.c.token_hash.in_(bindparam("hashes", expanding=True)))
)


@dataclass(frozen=True, slots=True)
class LiveSession:
    """A web session that has not ended, and its principal. ``is_due``: its last use is to be written.

    ``operator``: first part of the key of an operator who looks at the tenant's pages; None for the tenant's own people.
    """

    id: int
    principal: Principal
    expires_at: datetime
    is_due: bool
    tenant_name: str
    operator: str | None = None


class WebSessionReader:
    """Finds the web sessions of requests."""

    def __init__(self, database: Database, clock: Clock, uses: KeyUses, *, idle: timedelta) -> None:
        """``idle`` is the time without a use after which a session has ended."""
        self._database = database
        self._clock = clock
        self._uses = uses
        self._idle = idle
        self._rows: Batcher[bytes, Any] = Batcher(self._read)

    async def find(self, token: str | None, address: str | None, *, is_use: bool = True) -> LiveSession:
        """Return the session with that secret. Raises ``Unauthenticated`` when it, or its key, has ended.

        ``is_use`` is false for what a page asks by itself: neither the session nor its key is used by that.
        """
        row, principal, now = await self._living(token, address)
        if is_use:
            self._uses.note(row.id, row.last_used_at, now)
        is_due = is_use and row.seen_at + _SEEN <= now
        return LiveSession(row.session_id, principal, row.session_ends, is_due, row.tenant_name, row.operator)

    async def principal(self, token: str | None, address: str | None) -> Principal:
        """Return the session's principal as it is now, as no use of the session or its key. Raises ``Unauthenticated``."""
        return (await self._living(token, address))[1]

    async def _living(self, token: str | None, address: str | None) -> tuple[Any, Principal, datetime]:
        row = None if not token else await self._rows.ask(_hash(token))
        now = self._clock()
        if row is None or row.session_ends <= now or row.seen_at + self._idle <= now:
            raise Unauthenticated("this session has ended; log in again")
        return row, live_principal(row, Via.UI, address, now), now

    async def _read(self, hashes: Sequence[bytes]) -> list[Any]:
        async with self._database.read() as session:
            rows = await session.execute(_BY_HASH, {"hashes": few_lengths(sorted(set(hashes)))})
            found: dict[bytes, Any] = {row.token_hash: row for row in rows}
        return [found.get(one) for one in hashes]


async def begin_session(
    transaction: AsyncSession, principal: Principal, *, now: datetime, lifetime: timedelta, agent: str
) -> str:
    """Begin a web session of the principal's key and return its secret. The key's oldest ones end beyond ``MOST_SESSIONS``."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    older = select(WebSession.id).where(WebSession.key_id == principal.key_id).order_by(WebSession.id.desc())
    await transaction.execute(
        delete(WebSession)
        .where(WebSession.id.in_(list(await transaction.scalars(older.offset(MOST_SESSIONS - 1)))))
        .execution_options(synchronize_session=False)
    )
    transaction.add(
        WebSession(
            token_hash=_hash(token),
            key_id=principal.key_id,
            tenant_id=principal.tenant,
            created_at=now,
            seen_at=now,
            expires_at=now + lifetime,
            address=None if principal.address is None else principal.address[:_LONGEST_ADDRESS],
            agent=agent[:_LONGEST_AGENT],
        )
    )
    await transaction.flush()
    return token


async def note_seen(transaction: AsyncSession, session_id: int, now: datetime) -> None:
    """Write that the session was used ``now``."""
    await transaction.execute(
        update(WebSession)
        .where(WebSession.id == session_id, WebSession.seen_at < now)
        .values(seen_at=now)
        .execution_options(synchronize_session=False)
    )


async def list_sessions(session: AsyncSession, tenant: TenantId, key_id: int | None = None) -> list[Any]:
    """Return rows of the tenant's web sessions with the prefix of their keys, latest first; of one key if it is named."""
    query = (
        select(
            WebSession.id,
            WebSession.key_id,
            WebSession.created_at,
            WebSession.seen_at,
            WebSession.expires_at,
            WebSession.address,
            WebSession.agent,
            ApiKey.prefix,
        )
        .join(ApiKey, ApiKey.id == WebSession.key_id)
        .where(WebSession.tenant_id == tenant, ApiKey.revoked_at.is_(None))
        .order_by(WebSession.id.desc())
        .limit(500)
    )
    return list(await session.execute(query if key_id is None else query.where(WebSession.key_id == key_id)))


async def end_session(transaction: AsyncSession, tenant: TenantId, session_id: int, *, key_id: int | None) -> None:
    """End a web session of the tenant, of that key if one is named. Raises ``NotFound``."""
    gone = delete(WebSession).where(WebSession.id == session_id, WebSession.tenant_id == tenant)
    if key_id is not None:
        gone = gone.where(WebSession.key_id == key_id)
    if (await transaction.execute(gone.returning(WebSession.id))).scalar_one_or_none() is None:
        raise NotFound("no such web session; it may have ended already")


async def end_other_sessions(
    transaction: AsyncSession, tenant: TenantId, kept: int, *, key_id: int | None
) -> list[int]:
    """End the tenant's web sessions but ``kept``, those of that key alone if one is named; return the numbers of the ended."""
    gone = delete(WebSession).where(WebSession.tenant_id == tenant, WebSession.id != kept)
    if key_id is not None:
        gone = gone.where(WebSession.key_id == key_id)
    return sorted(await transaction.scalars(gone.returning(WebSession.id)))


async def delete_ended_sessions(transaction: AsyncSession, *, now: datetime, idle: timedelta, most: int) -> int:
    """Delete at most ``most`` web sessions that have ended, those of revoked keys included; return how many."""
    ended = (
        select(WebSession.id)
        .join(ApiKey, ApiKey.id == WebSession.key_id)
        .where(
            or_(WebSession.expires_at <= now, WebSession.seen_at <= now - idle, ApiKey.revoked_at.is_not(None)),
        )
        .limit(most)
    )
    gone = await transaction.execute(delete(WebSession).where(WebSession.id.in_(ended)).returning(WebSession.id))
    return len(gone.all())


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
