"""Billing endpoints in the SDK's form: usage by hour, and the storage of checkpoints now.

The SDK's costs are in US dollars: without a price in that currency they are null, as the SDK documents it.
"""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Annotated, Final, NamedTuple

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import BillingReader
from api.endable_response import EndableResponse
from api.request_body import off_loop
from api.security_events import note_read
from api.services import ApiServices, Services
from api.wire.request_model import NO_NUL, UtcTime, text_values
from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.operations import OperationKind
from store.database import Database
from tenants.audit_actions import Action
from tenants.prices import HOURS_OF_A_MONTH, PricedQuantity, Tariff, cost_text, tariff
from tenants.projects import find_projects
from tenants.reach import Owner, Reach
from tenants.rights import Principal
from tenants.storage_hours import HOUR, StorageLine, count_storage_lines, storage_lines, stored_now
from tenants.usage_costs import priced_pages, quantities, sums_of
from tenants.usage_exports import final_before
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, count_usage_lines
from tenants.usage_names import KeyName, key_names, metadata_of_sessions

router = APIRouter(tags=["billing"])

LONGEST_WINDOW = timedelta(days=14)
MOST_LINES = 50_000
"""Lines of usage in one answer."""
GIGABYTE = 10**9
_BYTES_OF_A_LINE = 512
_LINES_AT_ONCE = 5_000
_EVENTS_AT_ONCE = 500
_SESSIONS_AT_ONCE = 500
_SAVES = frozenset(
    {OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, OperationKind.SAVE_WEIGHTS_EXTERNAL}
)
_INFOS: Final[dict[PricedQuantity, dict[str, object]]] = {
    PricedQuantity.TRAIN_TOKENS: {"type": "training"},
    PricedQuantity.PROMPT_TOKENS: {"type": "sampling_prefill", "cached": False},
    PricedQuantity.CACHED_PROMPT_TOKENS: {"type": "sampling_prefill", "cached": True},
    PricedQuantity.SAMPLED_TOKENS: {"type": "sampling_sample"},
}
"""Kind of event of each meter of tokens."""
_BY = (Dimension.SESSION, Dimension.PROJECT, Dimension.KEY, Dimension.BASE_MODEL, Dimension.KIND)

Number = orjson.Fragment | None
"""JSON number with all its digits, or null."""


class StoredInProject(BaseModel):
    """Checkpoints of one project."""

    project_id: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None


class CurrentStorage(BaseModel):
    """Checkpoints that are stored now."""

    effective_rate_usd_per_gigabyte_month: float | None
    data: list[StoredInProject]


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that every event of an answer is told with."""

    prices: Tariff
    keys: dict[int, KeyName]
    final_before: datetime
    """End of the hours whose usage does not change any more."""


class _Event(NamedTuple):
    """An encoded event. Events are told in this order: by hour, the most tokens first."""

    start: datetime
    fewer_tokens: int
    """Number of tokens, below zero."""
    told: bytes


@router.get("/billing/usage/events")
async def usage_events(
    caller: BillingReader, services: Services, request: Request, starting_on: UtcTime, ending_before: UtcTime
) -> Response:
    """List the caller's usage by hour, session, key and base model, with a row for each kind of usage.

    The answer is made while it is sent: of a window's lines no more are in memory than a page and the hour that is not whole
    yet, whose events must be put in order. A tenant has one such answer at a time. Raises ``InvalidRequest`` for a window that
    does not begin and end at whole hours, or has too much, ``TooManyRequests``.
    """
    note_read(request, caller, Action.USAGE_READ)
    since, before = _hour(starting_on, "starting_on"), _hour(ending_before, "ending_before")
    if not since < before <= since + LONGEST_WINDOW:
        raise InvalidRequest("ending_before must be after starting_on, and at most 14 days after it")
    await services.admission.hold_usage(caller.tenant, request.scope)
    async with services.runtime.database.survey() as session:
        lines = await count_usage_lines(session, caller.reach, since=since, before=before, by=_BY, most=MOST_LINES + 1)
        stored = await count_storage_lines(session, caller.reach, since=since, before=before, most=MOST_LINES + 1)
        if max(lines, stored) > MOST_LINES:
            raise InvalidRequest(f"the window has more than {MOST_LINES} lines; ask for fewer hours at once")
        facts = _Facts(
            await _dollars(session, caller.tenant),
            await key_names(session, caller.tenant),
            min(before, await final_before(session, services.runtime.clock())),
        )
    body = StreamingResponse(_told(services, caller, facts, since, before), media_type="application/json")
    return EndableResponse(body, services.ended_keys.of(caller.tenant, caller.key_id))


@router.get("/billing/usage/checkpoints/current")
async def current_storage(
    caller: BillingReader,
    services: Services,
    request: Request,
    project_id: Annotated[str | None, Query(pattern=NO_NUL)] = None,
) -> CurrentStorage:
    """Tell what the caller stores now, by project; of one project if its id or name is given.

    Raises ``Forbidden`` for an unknown project.
    """
    note_read(request, caller, Action.USAGE_READ)
    async with services.runtime.database.survey() as session:
        reach = caller.reach
        if project_id is not None:
            reach = Reach(caller.tenant, await find_projects(session, caller.reach, [project_id]))
        stored = await stored_now(session, reach)
        prices = await _dollars(session, caller.tenant)
    now = services.runtime.clock()
    return CurrentStorage(
        effective_rate_usd_per_gigabyte_month=_float(prices.rate(PricedQuantity.STORAGE, None, now)),
        data=[
            StoredInProject(
                project_id=one.project,
                checkpoint_count=one.checkpoints,
                size_bytes=one.nbytes,
                size_gigabytes=one.nbytes / GIGABYTE,
                estimated_monthly_cost_usd=_float(
                    prices.cost(PricedQuantity.STORAGE, one.nbytes * HOURS_OF_A_MONTH, None, now)
                ),
            )
            for one in stored
        ],
    )


async def _dollars(session: AsyncSession, tenant: TenantId) -> Tariff:
    """Return the prices if they are in the currency of the SDK's fields, else none."""
    prices = await tariff(session, tenant)
    return prices if prices.currency == "USD" else Tariff()


def _float(amount: Decimal | None) -> float | None:
    # The answer's own form has floats here; sums are made before.
    return None if amount is None else float(amount)


def _number(amount: Decimal | None) -> Number:
    text = cost_text(amount)
    return None if text is None else orjson.Fragment(text)


def _hour(time: datetime, name: str) -> datetime:
    if time != time.replace(minute=0, second=0, microsecond=0):
        raise InvalidRequest(f"{name} must be a whole hour of UTC; got {time.isoformat()}")
    return time


async def _told(
    services: ApiServices, caller: Principal, facts: _Facts, since: datetime, before: datetime
) -> AsyncIterator[bytes]:
    """Yield the answer as JSON, piece by piece."""
    sessions: set[str] = set()
    comma = b""
    yield b'{"data":['
    async for events in _ready_events(services, caller, facts, since, before, sessions):
        for begin in range(0, len(events), _EVENTS_AT_ONCE):
            yield comma + b",".join(event.told for event in events[begin : begin + _EVENTS_AT_ONCE])
            comma = b","
    yield b'],"sessions":{'
    comma = b""
    wanted = sorted(sessions)
    for begin in range(0, len(wanted), _SESSIONS_AT_ONCE):
        some = wanted[begin : begin + _SESSIONS_AT_ONCE]
        async with services.runtime.database.survey() as session:
            found = await metadata_of_sessions(session, caller.tenant, some)
        if found:
            told = {id: {"user_metadata": text_values(metadata)} for id, metadata in found.items()}
            yield comma + orjson.dumps(told)[1:-1]
            comma = b","
    through = facts.final_before.isoformat() if facts.prices.currency else None
    yield b'},"cost_data_through":' + orjson.dumps(through) + b"}"


async def _ready_events(
    services: ApiServices, caller: Principal, facts: _Facts, since: datetime, before: datetime, sessions: set[str]
) -> AsyncIterator[list[_Event]]:
    """Yield all events in their order, and add the sessions that they name to ``sessions``."""
    database = services.runtime.database
    kept: list[_Event] = []
    metered_to = since
    async for lines, whole_to in _pages(database, caller.reach, since, before):
        sessions.update(line.session for line in lines if line.session is not None)
        kept += await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(lines), _encoded, lines, facts)
        for begin, end in _days(metered_to, whole_to):
            kept += await _stored(database, caller.reach, facts, begin, end)
            ready, kept = await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(kept), _parted, kept, end)
            yield ready
            # Nobody holds them while the next ones are made.
            ready.clear()
        metered_to = whole_to


async def _pages(
    database: Database, owner: Owner, since: datetime, before: datetime
) -> AsyncIterator[tuple[list[UsageLine], datetime]]:
    """Yield the lines of usage page by page, each with the end of the hours that are whole with it."""
    pages = priced_pages(
        database, owner, since=since, before=before, by=_BY, width=BucketWidth.HOUR, most=_LINES_AT_ONCE
    )
    async for page in pages:
        if page:
            # Behind the last line come further ones of its hour.
            yield [priced.line for priced in page], page[-1].line.start
    yield [], before


def _days(since: datetime, before: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the begin and the end of each part of a window, of a day or less."""
    while since < before:
        end = min(before, since + timedelta(days=1))
        yield since, end
        since = end


async def _stored(database: Database, owner: Owner, facts: _Facts, since: datetime, before: datetime) -> list[_Event]:
    """Return the events of storage from ``since`` on and before ``before``."""
    async with database.survey() as session:
        lines = await storage_lines(session, owner, since=since, before=before, limit=MOST_LINES)
    return [_event(line.hour, 0, _storage_event(line, facts.prices)) for line in lines]


def _parted(events: list[_Event], end: datetime) -> tuple[list[_Event], list[_Event]]:
    """Return the events of the hours before ``end`` in their order, and the others."""
    ready = sorted((event for event in events if event.start < end), key=itemgetter(0, 1))
    return ready, [event for event in events if event.start >= end]


def _encoded(lines: list[UsageLine], facts: _Facts) -> list[_Event]:
    """Return the events of the lines."""
    return [event for line in lines for event in _events(line, facts.keys, facts.prices)]


def _event(start: datetime, tokens: int, event: dict[str, object]) -> _Event:
    # What orjson returns keeps the 4 KiB that it was written in.
    return _Event(start, -tokens, bytes(memoryview(orjson.dumps(event))))


def _events(line: UsageLine, keys: dict[int, KeyName], prices: Tariff) -> Iterator[_Event]:
    key = keys.get(line.key or 0)
    envelope = {
        "base_model": line.base_model,
        "user_id": None if key is None else key.prefix,
        "user_name": None if key is None else key.note or None,
        "session_id": line.session,
        "project_id": line.project,
    }
    counts = quantities(sums_of(line))
    for meter, info in _INFOS.items():
        if tokens := counts[meter]:
            rate = prices.rate(meter, line.base_model, line.start)
            cost = prices.cost(meter, tokens, line.base_model, line.start)
            priced = {"estimated_cost_usd": _number(cost), "effective_rate_usd_per_million_tokens": _number(rate)}
            event = _bucket(line.start) | envelope | priced | {"event_info": {**info, "token_count": tokens}}
            yield _event(line.start, tokens, event)
    if line.kind in _SAVES and line.operations:
        event = _bucket(line.start) | envelope | {"event_info": {"type": "checkpoint", "count": line.operations}}
        yield _event(line.start, 0, event)


def _storage_event(line: StorageLine, prices: Tariff) -> dict[str, object]:
    info = {"type": "storage", "free": False, "gigabyte_hours": line.nbytes / GIGABYTE}
    named = {"base_model": None, "user_id": None, "user_name": None, "session_id": None, "project_id": line.project}
    priced = {
        "estimated_cost_usd": _number(prices.cost(PricedQuantity.STORAGE, line.nbytes, None, line.hour)),
        "effective_rate_usd_per_gigabyte_month": _number(prices.rate(PricedQuantity.STORAGE, None, line.hour)),
    }
    return _bucket(line.hour) | named | priced | {"event_info": info}


def _bucket(start: datetime) -> dict[str, object]:
    return {
        "bucket_start": start.isoformat(),
        "bucket_end": (start + HOUR).isoformat(),
        "estimated_cost_usd": None,
        "effective_rate_usd_per_million_tokens": None,
        "effective_rate_usd_per_gigabyte_month": None,
    }
