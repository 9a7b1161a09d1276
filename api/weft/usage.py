"""``GET /usage``: a tenant's usage by hour or day, told apart by what it asks for."""

import csv
import io
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel

from api.authentication import UsageReader
from api.services import Services
from api.wire.request_model import UtcTime
from tenants.usage_hours import BucketWidth, Dimension, UsageLine, usage_lines

router = APIRouter(tags=["usage"])

DEFAULT_LINES = 1000
MOST_LINES = 10_000


class UsageInfo(BaseModel):
    """Usage of a bucket. What was not asked for, a sample's run and an unknown key are null.

    A prompt counts once for each request; ``cached_prompt_tokens`` of ``prompt_tokens`` came from a cache.
    """

    start: datetime
    project: str | None
    session: str | None
    run: str | None
    key: int | None
    base_model: str | None
    kind: str | None
    operations: int
    failed: int
    train_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int


class Usage(BaseModel):
    """Lines in order of time. ``next_offset`` is where the next page begins, null on the last one."""

    lines: list[UsageInfo]
    next_offset: int | None


@router.get("/usage", response_model=Usage)
async def read_usage(
    caller: UsageReader,
    services: Services,
    since: UtcTime,
    before: UtcTime | None = None,
    group_by: Annotated[list[Dimension], Query()] = [],  # noqa: B006
    bucket_width: BucketWidth = BucketWidth.HOUR,
    limit: Annotated[int, Query(ge=1, le=MOST_LINES)] = DEFAULT_LINES,
    offset: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    format: Literal["json", "csv"] = "json",
) -> Usage | Response:
    """Return the caller's usage of the hours that begin from ``since`` on and before ``before``, by default all up to now.

    What has been answered is in it. Raises ``InvalidRequest`` for a time without a zone.
    """
    end = before or datetime.max.replace(tzinfo=UTC)
    async with services.runtime.database.read() as session:
        found = await usage_lines(
            session,
            caller.reach,
            since=since,
            before=end,
            by=group_by,
            width=bucket_width,
            limit=limit + 1,
            offset=offset,
        )
    further = offset + limit if len(found) > limit else None
    if format == "csv":
        headers = {} if further is None else {"x-next-offset": str(further)}
        return Response(_csv(found[:limit]), media_type="text/csv", headers=headers)
    lines = [UsageInfo.model_validate(line, from_attributes=True) for line in found[:limit]]
    return Usage(lines=lines, next_offset=further)


def _csv(lines: list[UsageLine]) -> str:
    """Return the lines as CSV with a header. No cell holds a user's text, but a base's name may begin with anything."""
    out = io.StringIO()
    names = list(UsageInfo.model_fields)
    writer = csv.writer(out)
    writer.writerow(names)
    for line in lines:
        writer.writerow([_cell(getattr(line, name)) for name in names])
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    text = value.isoformat() if isinstance(value, datetime) else value
    # A spreadsheet takes such a text for a formula.
    return f"'{text}" if isinstance(text, str) and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
