"""Browsers that are logged in as operators: a row for each, found by the SHA-256 of its cookie's secret; and one-time codes.

Apart from tenants' sessions: another table, another cookie, another listener. Each request reads the operator's key anew, so
that a revoked or expired key ends its sessions at once.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import InvalidRequest, NotFound, Unauthenticated
from store.deletions import delete_some
from store.tables import OperatorCode, OperatorKey, OperatorSession
from tenants.key_text import shown_prefix
from tenants.login_codes import CODE_BYTES, CODE_LIFE
from tenants.operator_keys import Operator

IDLE, WHOLE = timedelta(hours=1), timedelta(hours=8)
"""Times after which a session ends: without a use, and in any case."""
MOST_OF_A_KEY = 20
"""Sessions of one key at a time; a further one ends the oldest."""
_SECRET_BYTES = 32
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class LiveOperatorSession:
    """A session that has not ended, and the operator that its requests act as."""

    id: int
    operator: Operator
    seen_at: datetime
    expires_at: datetime

    def is_due(self, now: datetime) -> bool:
        """Return whether ``note_operator_seen`` has something to note."""
        return self.seen_at <= now - _MINUTE


async def begin_operator_session(
    transaction: AsyncSession, operator: Operator, *, address: str | None, agent: str, now: datetime
) -> str:
    """Begin a session of the operator's key and return the cookie's secret, which is stored nowhere."""
    assert operator.key_id is not None
    kept = (
        select(OperatorSession.id)
        .where(OperatorSession.operator_key_id == operator.key_id)
        .order_by(OperatorSession.id.desc())
        .limit(MOST_OF_A_KEY - 1)
        .scalar_subquery()
    )
    older = delete(OperatorSession).where(
        OperatorSession.operator_key_id == operator.key_id, OperatorSession.id.not_in(kept)
    )
    await transaction.execute(older)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    row = OperatorSession(
        secret_hash=_hash(secret),
        operator_key_id=operator.key_id,
        created_at=now,
        seen_at=now,
        expires_at=now + WHOLE,
        address=None if address is None else address[:64],
        agent=agent[:200],
    )
    transaction.add(row)
    await transaction.flush()
    return secret


async def live_operator_session(session: AsyncSession, secret: str, *, now: datetime) -> LiveOperatorSession | None:
    """Return the session with that secret, or None if there is none that goes on, or its key has ended."""
    found = await session.execute(
        select(
            OperatorSession.id,
            OperatorKey.id.label("key_id"),
            OperatorKey.prefix,
            OperatorSession.seen_at,
            OperatorSession.expires_at,
        )
        .join(OperatorKey, OperatorKey.id == OperatorSession.operator_key_id)
        .where(
            OperatorSession.secret_hash == _hash(secret),
            *_goes_on(now),
            *_is_live_key(now),
        )
    )
    row = found.one_or_none()
    if row is None:
        return None
    operator = replace(Operator(row.prefix, row.key_id), is_browser=True)
    return LiveOperatorSession(row.id, operator, row.seen_at, row.expires_at)


async def note_operator_seen(transaction: AsyncSession, session_id: int, now: datetime) -> None:
    """Note a request of the session, at most once a minute."""
    await transaction.execute(
        update(OperatorSession)
        .where(OperatorSession.id == session_id, OperatorSession.seen_at <= now - _MINUTE)
        .values(seen_at=now)
        .execution_options(synchronize_session=False)
    )


async def list_operator_sessions(session: AsyncSession, key_id: int, now: datetime) -> Sequence[OperatorSession]:
    """Return the key's sessions that go on, the latest first."""
    own = select(OperatorSession).where(OperatorSession.operator_key_id == key_id, *_goes_on(now))
    return (await session.scalars(own.order_by(OperatorSession.id.desc()))).all()


async def end_operator_session(transaction: AsyncSession, session_id: int, *, key_id: int) -> None:
    """End the key's session. Raises ``NotFound`` for one that has ended, or is another key's."""
    own = delete(OperatorSession).where(OperatorSession.id == session_id, OperatorSession.operator_key_id == key_id)
    if await transaction.scalar(own.returning(OperatorSession.id)) is None:
        raise NotFound("there is no such session: it has ended")


async def delete_ended_operator_sessions(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete up to ``most`` sessions that are over, and those of revoked keys; returns their number."""
    revoked = select(OperatorKey.id).where(OperatorKey.revoked_at.is_not(None)).scalar_subquery()
    over = or_(
        OperatorSession.expires_at <= now,
        OperatorSession.seen_at <= now - IDLE,
        OperatorSession.operator_key_id.in_(revoked),
    )
    return await delete_some(transaction, OperatorSession, over, most=most)


def _goes_on(now: datetime) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that a session is not over by its times."""
    return OperatorSession.expires_at > now, OperatorSession.seen_at > now - IDLE


async def make_operator_code(transaction: AsyncSession, key: str, now: datetime) -> tuple[str, str]:
    """Return a new code for the operator's key with this text or first part, and that part.

    Raises ``NotFound``, ``InvalidRequest`` for a key that has ended.
    """
    prefix = shown_prefix(key)
    found = await transaction.scalar(select(OperatorKey).where(OperatorKey.prefix == prefix))
    if found is None:
        raise NotFound(f"no operator's key starts with {prefix!r}; `weft operator list` shows them")
    if found.revoked_at is not None or (found.expires_at is not None and found.expires_at <= now):
        raise InvalidRequest(f"operator's key {prefix} has ended; `weft operator create` makes another")
    code = secrets.token_urlsafe(CODE_BYTES)
    transaction.add(OperatorCode(code_hash=_hash(code), operator_key_id=found.id, expires_at=now + CODE_LIFE))
    await transaction.flush()
    return code, prefix


async def redeem_operator_code(transaction: AsyncSession, code: str, now: datetime) -> Operator:
    """Use the code up, and return its key's operator. Raises ``Unauthenticated`` for a wrong, used or expired one."""
    used = delete(OperatorCode).where(OperatorCode.code_hash == _hash(code), OperatorCode.expires_at > now)
    key_id = (await transaction.execute(used.returning(OperatorCode.operator_key_id))).scalar_one_or_none()
    live = select(OperatorKey.prefix).where(OperatorKey.id == key_id, *_is_live_key(now))
    prefix: str | None = await transaction.scalar(live)
    if prefix is None or key_id is None:
        raise Unauthenticated(
            "this one-time code was used before, or its time is over; `weft ui open --operator` makes another"
        )
    return Operator(prefix, key_id)


async def delete_expired_operator_codes(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete at most ``most`` expired codes; return how many."""
    return await delete_some(transaction, OperatorCode, OperatorCode.expires_at <= now, most=most)


def _is_live_key(now: datetime) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions that an operator's key has not ended."""
    return OperatorKey.revoked_at.is_(None), or_(OperatorKey.expires_at.is_(None), OperatorKey.expires_at > now)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
