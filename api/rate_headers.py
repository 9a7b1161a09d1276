"""Headers that tell a client its rate.

``RateLimit-Policy`` and ``RateLimit`` are structured fields of the IETF's draft; OpenAI's clients read ``x-ratelimit-…``.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from datetime import datetime
from math import ceil

from contracts.ids import TenantId
from store.database import Database
from tenants.rates import Meter, RateState, rate_states
from tenants.standing import RateStanding, rate_standing

_noted: ContextVar[RateStanding | None] = ContextVar("weft_rate", default=None)


def note_rate(meter: Meter, state: RateState | None, now: datetime) -> None:
    """Have the answer to the running task's request tell this rate."""
    if state is not None:
        _noted.set(rate_standing(meter, state, now))


async def note_stored_rate(database: Database, tenant: TenantId, meter: Meter, now: datetime) -> None:
    """Have the answer to the running task's request tell how the tenant's rate stands in the database."""
    async with database.read() as session:
        states = await rate_states(session, [tenant])
    note_rate(meter, states.get((tenant, meter)), now)


def noted_headers(path: str, own: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer whose rate was noted. ``own`` are those it has, with ``Retry-After`` of a refusal."""
    rate = _noted.get()
    if rate is None:
        return []
    told_seconds = next((int(value) for name, value in own if name == b"retry-after"), None)
    seconds = ceil(rate.seconds) if told_seconds is None else told_seconds
    policy = f'"{rate.meter}-tokens";q={rate.burst};w={max(1, ceil(rate.burst * 60 / rate.per_minute))}'
    told = {"ratelimit-policy": policy, "ratelimit": f'"{rate.meter}-tokens";r={rate.remaining};t={seconds}'}
    if path.startswith("/v1/"):
        told["x-ratelimit-limit-tokens"] = str(rate.burst)
        told["x-ratelimit-remaining-tokens"] = str(rate.remaining)
        told["x-ratelimit-reset-tokens"] = f"{seconds}s"
    return [(name.encode(), value.encode()) for name, value in told.items()]
