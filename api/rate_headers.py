"""Headers that tell a client its rate.

``RateLimit-Policy`` and ``RateLimit`` are structured fields of the IETF's draft; OpenAI's clients read ``x-ratelimit-…``.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from math import ceil

from contracts.ledger_records import NewOperation
from store.database import Database
from tenants.rate_lines import line_states
from tenants.rates import Meter, RateState, rate_states, tightest
from tenants.standing import RateStanding, rate_standing


@dataclass(slots=True)
class _Noted:
    """Rate that the answer to a request tells. One object for all tasks that work on the request."""

    rate: RateStanding | None = None


_noted: ContextVar[_Noted | None] = ContextVar("weft_rate", default=None)


def begin_noting() -> None:
    """Note rates of a new request. Call it once, at the edge, in the request's task."""
    _noted.set(_Noted())


def note_rate(meter: Meter, state: RateState | None, now: datetime) -> None:
    """Have the answer to the running task's request tell this rate."""
    if state is not None and (noted := _noted.get()) is not None:
        noted.rate = rate_standing(meter, state, now)


async def note_stored_rate(database: Database, operation: NewOperation, meter: Meter, now: datetime) -> None:
    """Have the answer to the running task's request tell how the tightest of the operation's rates stands in the database."""
    async with database.read() as session:
        states = await rate_states(session, [operation.tenant])
        of_lines = await line_states(session, operation.lines)
    of_tenant = [state for (_, of), state in states.items() if of is meter]
    note_rate(meter, tightest([*of_tenant, *of_lines.values()], now), now)


def noted_headers(path: str, own: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer whose rate was noted. ``own`` are those it has, with ``Retry-After`` of a refusal."""
    noted = _noted.get()
    if noted is None or noted.rate is None:
        return []
    rate = noted.rate
    told_seconds = next((int(value) for name, value in own if name == b"retry-after"), None)
    seconds = ceil(rate.seconds) if told_seconds is None else told_seconds
    policy = f'"{rate.meter}-tokens";q={rate.burst};w={max(1, ceil(rate.burst * 60 / rate.per_minute))}'
    told = {"ratelimit-policy": policy, "ratelimit": f'"{rate.meter}-tokens";r={rate.remaining};t={seconds}'}
    if path.startswith("/v1/"):
        told["x-ratelimit-limit-tokens"] = str(rate.burst)
        told["x-ratelimit-remaining-tokens"] = str(rate.remaining)
        told["x-ratelimit-reset-tokens"] = f"{seconds}s"
    return [(name.encode(), value.encode()) for name, value in told.items()]
