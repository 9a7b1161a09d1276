"""Billing endpoints in the SDK's form: usage by hour, and the storage of checkpoints now.

weft has no prices, so every cost and rate is null, which the SDK documents for usage that is not priced.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from api.authentication import BillingReader
from api.request_body import off_loop
from api.services import Services
from api.wire.request_model import NO_NUL, UtcTime
from contracts.errors import InvalidRequest
from contracts.operations import OperationKind
from tenants.storage_hours import HOUR, StorageLine, storage_lines, stored_now
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
_BY = (Dimension.SESSION, Dimension.PROJECT, Dimension.KEY, Dimension.BASE_MODEL, Dimension.KIND)


class StoredInProject(BaseModel):
    """Checkpoints of one project."""

    project_id: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentStorage(BaseModel):
    """Checkpoints that are stored now."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[StoredInProject]


@dataclass(frozen=True, slots=True)
class _Window:
    """All that an answer is made of."""

    usage: list[UsageLine]
    storage: list[StorageLine]
    keys: dict[int, KeyName] = field(default_factory=dict)
    metadata: dict[str, dict[str, str] | None] = field(default_factory=dict)


@router.get("/billing/usage/events")
async def usage_events(
    caller: BillingReader, services: Services, starting_on: UtcTime, ending_before: UtcTime
) -> Response:
    """List the caller's usage by hour, session, key and base model, with a row for each kind of usage.

    Raises ``InvalidRequest`` for a window that does not begin and end at whole hours, or has too much.
    """
    since, before = _hour(starting_on, "starting_on"), _hour(ending_before, "ending_before")
    if not since < before <= since + LONGEST_WINDOW:
        raise InvalidRequest("ending_before must be after starting_on, and at most 14 days after it")
    async with services.runtime.database.read() as session:
        usage = await usage_lines(session, caller.reach, since=since, before=before, by=_BY, limit=MOST_LINES + 1)
        storage = await storage_lines(session, caller.reach, since=since, before=before, limit=MOST_LINES + 1)
        if max(len(usage), len(storage)) > MOST_LINES:
            raise InvalidRequest(f"the window has more than {MOST_LINES} lines; ask for fewer hours at once")
        sessions = {line.session for line in usage if line.session is not None}
        found = _Window(
            usage,
            storage,
            await key_names(session, caller.tenant),
            await metadata_of_sessions(session, caller.tenant, sessions),
        )
    body = await off_loop(services, caller.tenant, _BYTES_OF_A_LINE * len(usage), _encoded, found)
    return Response(body, media_type="application/json")


@router.get("/billing/usage/checkpoints/current")
async def current_storage(
    caller: BillingReader, services: Services, project_id: Annotated[str | None, Query(pattern=NO_NUL)] = None
) -> CurrentStorage:
    """Tell what the caller stores now, by project."""
    async with services.runtime.database.read() as session:
        stored = await stored_now(session, caller.reach)
    return CurrentStorage(
        data=[
            StoredInProject(
                project_id=one.project,
                checkpoint_count=one.checkpoints,
                size_bytes=one.nbytes,
                size_gigabytes=one.nbytes / GIGABYTE,
            )
            for one in stored
            if project_id is None or one.project == project_id
        ]
    )


def _hour(time: datetime, name: str) -> datetime:
    if time != time.replace(minute=0, second=0, microsecond=0):
        raise InvalidRequest(f"{name} must be a whole hour of UTC; got {time.isoformat()}")
    return time


def _encoded(found: _Window) -> bytes:
    """Return the answer as JSON. Takes its time for a long window, so it is made off the event loop."""
    events = [event for line in found.usage for event in _events(line, found.keys)]
    events += [_storage_event(line) for line in found.storage]
    events.sort(key=_order)
    sessions = {id: {"user_metadata": metadata} for id, metadata in found.metadata.items()}
    return orjson.dumps({"data": events, "sessions": sessions, "cost_data_through": None})


def _order(event: dict[str, object]) -> tuple[str, int]:
    info = event["event_info"]
    tokens = info.get("token_count", 0) if isinstance(info, dict) else 0
    return str(event["bucket_start"]), -int(tokens)


def _events(line: UsageLine, keys: dict[int, KeyName]) -> Iterator[dict[str, object]]:
    key = keys.get(line.key or 0)
    envelope = _bucket(line.start) | {
        "base_model": line.base_model,
        "user_id": None if key is None else key.prefix,
        "user_name": None if key is None else key.note or None,
        "session_id": line.session,
        "project_id": line.project,
    }
    infos: list[dict[str, object]] = []
    if line.train_tokens:
        infos.append({"type": "training", "token_count": line.train_tokens})
    for cached, tokens in (
        (False, line.prompt_tokens - line.cached_prompt_tokens),
        (True, line.cached_prompt_tokens),
    ):
        if tokens:
            infos.append({"type": "sampling_prefill", "cached": cached, "token_count": tokens})
    if line.sampled_tokens:
        infos.append({"type": "sampling_sample", "token_count": line.sampled_tokens})
    if line.kind in _SAVES and line.operations:
        infos.append({"type": "checkpoint", "count": line.operations})
    for info in infos:
        yield envelope | {"event_info": info}


def _storage_event(line: StorageLine) -> dict[str, object]:
    info = {"type": "storage", "free": False, "gigabyte_hours": line.nbytes / GIGABYTE}
    named = {"base_model": None, "user_id": None, "user_name": None, "session_id": None, "project_id": line.project}
    return _bucket(line.hour) | named | {"event_info": info}


def _bucket(start: datetime) -> dict[str, object]:
    return {
        "bucket_start": start.isoformat(),
        "bucket_end": (start + HOUR).isoformat(),
        "estimated_cost_usd": None,
        "effective_rate_usd_per_million_tokens": None,
        "effective_rate_usd_per_gigabyte_month": None,
    }
