"""One-time codes that begin a web session of the dashboard without the key being typed or sent."""

import hashlib
import secrets
from datetime import datetime, timedelta

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from contracts.errors import Unauthenticated
from store.deletions import delete_some
from store.tables import ApiKey, LoginCode

CODE_BYTES = 16
CODE_LIFE = timedelta(seconds=60)
GREETING_LIFE = timedelta(minutes=10)
"""Life of the code that the greeting of a very first start prints: its reader may still be looking for a browser."""


async def make_code(transaction: AsyncSession, key_id: int, *, now: datetime, life: timedelta = CODE_LIFE) -> str:
    """Return a new code for the key."""
    code = secrets.token_urlsafe(CODE_BYTES)
    transaction.add(LoginCode(code_hash=_hash(code), key_id=key_id, expires_at=now + life))
    await transaction.flush()
    return code


async def redeem_code(transaction: AsyncSession, code: str, now: datetime) -> str:
    """Use the code up, and return the prefix of its key. Raises ``Unauthenticated`` for a wrong, used or expired one."""
    used = delete(LoginCode).where(LoginCode.code_hash == _hash(code), LoginCode.expires_at > now)
    key_id = (await transaction.execute(used.returning(LoginCode.key_id))).scalar_one_or_none()
    prefix: str | None = await transaction.scalar(select(ApiKey.prefix).where(ApiKey.id == key_id))
    if prefix is None:
        raise Unauthenticated("this code was used before, or is over; `weft ui open` makes another")
    return prefix


async def delete_expired_codes(transaction: AsyncSession, *, now: datetime, most: int) -> int:
    """Delete at most ``most`` expired codes; return how many."""
    return await delete_some(transaction, LoginCode, LoginCode.expires_at <= now, most=most)


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()
