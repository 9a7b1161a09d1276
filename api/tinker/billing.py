"""Billing endpoints in the SDK's form: usage by hour, and the storage of checkpoints now.

The SDK's costs are in US dollars: without a price in that currency they are null, as the SDK documents it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.authentication import BillingReader
from api.request_body import off_loop
from api.security_events import note_read
from api.services import Services
from api.wire.request_model import NO_NUL, UtcTime
from contracts.errors import InvalidRequest
from contracts.ids import TenantId
from contracts.operations import OperationKind
from tenants.audit_actions import Action
from tenants.prices import HOURS_OF_A_MONTH, Meter, Tariff, tariff, told
from tenants.projects import find_projects
from tenants.reach import Reach
from tenants.storage_hours import HOUR, StorageLine, storage_lines, stored_now
from tenants.usage_costs import quantities, sums_of
from tenants.usage_exports import final_before
from tenants.usage_hours import Dimension, UsageLine, usage_lines
from tenants.usage_names import KeyName, key_names, metadata_of_sessions

router = APIRouter(tags=["billing"])

LONGEST_WINDOW = timedelta(days=14)
MOST_LINES = 50_000
"""Lines of usage in one answer."""
GIGABYTE = 10**9
_BYTES_OF_A_LINE = 512
_SAVES = frozenset(
    {OperationKind.SAVE_WEIGHTS, OperationKind.SAVE_WEIGHTS_FOR_SAMPLER, OperationKind.SAVE_WEIGHTS_EXTERNAL}
)
_INFOS: Final[dict[Meter, dict[str, object]]] = {
    Meter.TRAIN_TOKENS: {"type": "training"},
    Meter.PROMPT_TOKENS: {"type": "sampling_prefill", "cached": False},
    Meter.CACHED_PROMPT_TOKENS: {"type": "sampling_prefill", "cached": True},
    Meter.SAMPLED_TOKENS: {"type": "sampling_sample"},
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
class _Window:
    """All that an answer is made of."""

    usage: list[UsageLine]
    storage: list[StorageLine]
    prices: Tariff
    final_before: datetime
    """End of the hours whose usage does not change any more."""
    keys: dict[int, KeyName] = field(default_factory=dict)
    metadata: dict[str, dict[str, str] | None] = field(default_factory=dict)


@router.get("/billing/usage/events")
async def usage_events(
    caller: BillingReader, services: Services, request: Request, starting_on: UtcTime, ending_before: UtcTime
) -> Response:
    """List the caller's usage by hour, session, key and base model, with a row for each kind of usage.

    Raises ``InvalidRequest`` for a window that does not begin and end at whole hours, or has too much.
    """
    note_read(request, caller, Action.USAGE_READ)
    since, before = _hour(starting_on, "starting_on"), _hour(ending_before, "ending_before")
    if not since < before <= since + LONGEST_WINDOW:
        raise InvalidRequest("ending_before must be after starting_on, and at most 14 days after it")
    async with services.runtime.database.survey() as session:
        usage = await usage_lines(session, caller.reach, since=since, before=before, by=_BY, limit=MOST_LINES + 1)
        storage = await storage_lines(session, caller.reach, since=since, before=before, limit=MOST_LINES + 1)
        if max(len(usage), len(storage)) > MOST_LINES:
            raise InvalidRequest(f"the window has more than {MOST_LINES} lines; ask for fewer hours at once")
        sessions = {line.session for line in usage if line.session is not None}
        found = _Window(
            usage,
            storage,
            await _dollars(session, caller.tenant),
            min(before, await final_before(session, services.runtime.clock())),
            await key_names(session, caller.tenant),
            await metadata_of_sessions(session, caller.tenant, sessions),
        )
    body = await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(usage), _encoded, found)
    return Response(body, media_type="application/json")


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
        effective_rate_usd_per_gigabyte_month=_float(prices.rate(Meter.STORAGE, None, now)),
        data=[
            StoredInProject(
                project_id=one.project,
                checkpoint_count=one.checkpoints,
                size_bytes=one.nbytes,
                size_gigabytes=one.nbytes / GIGABYTE,
                estimated_monthly_cost_usd=_float(prices.cost(Meter.STORAGE, one.nbytes * HOURS_OF_A_MONTH, None, now)),
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
    text = told(amount)
    return None if text is None else orjson.Fragment(text)


def _hour(time: datetime, name: str) -> datetime:
    if time != time.replace(minute=0, second=0, microsecond=0):
        raise InvalidRequest(f"{name} must be a whole hour of UTC; got {time.isoformat()}")
    return time


def _encoded(found: _Window) -> bytes:
    """Return the answer as JSON. Takes its time for a long window, so it is made off the event loop."""
    events = [event for line in found.usage for event in _events(line, found.keys, found.prices)]
    events += [_storage_event(line, found.prices) for line in found.storage]
    events.sort(key=_order)
    sessions = {id: {"user_metadata": metadata} for id, metadata in found.metadata.items()}
    through = found.final_before.isoformat() if found.prices.currency else None
    return orjson.dumps({"data": events, "sessions": sessions, "cost_data_through": through})


def _order(event: dict[str, object]) -> tuple[str, int]:
    info = event["event_info"]
    tokens = info.get("token_count", 0) if isinstance(info, dict) else 0
    return str(event["bucket_start"]), -int(tokens)


def _events(line: UsageLine, keys: dict[int, KeyName], prices: Tariff) -> Iterator[dict[str, object]]:
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
            yield _bucket(line.start) | envelope | priced | {"event_info": {**info, "token_count": tokens}}
    if line.kind in _SAVES and line.operations:
        yield _bucket(line.start) | envelope | {"event_info": {"type": "checkpoint", "count": line.operations}}


def _storage_event(line: StorageLine, prices: Tariff) -> dict[str, object]:
    info = {"type": "storage", "free": False, "gigabyte_hours": line.nbytes / GIGABYTE}
    named = {"base_model": None, "user_id": None, "user_name": None, "session_id": None, "project_id": line.project}
    priced = {
        "estimated_cost_usd": _number(prices.cost(Meter.STORAGE, line.nbytes, None, line.hour)),
        "effective_rate_usd_per_gigabyte_month": _number(prices.rate(Meter.STORAGE, None, line.hour)),
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
