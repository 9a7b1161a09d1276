"""Bodies, pages and row versions that all admin endpoints share."""

import hashlib
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, Header, Path, Query, Request
from pydantic import BaseModel, Field

from api.admin.services import Admin, Caller
from api.openapi_document import reads
from api.route_bounds import SMALL_BODY
from api.wire.body import expanded, read_body
from api.wire.request_model import NO_NUL, PlainText, RequestModel, parse_json
from contracts.errors import EditConflict, InvalidRequest

MOST_ROWS = 200
"""Most rows of one page."""

T = TypeVar("T")

PathId = Annotated[str, Path(pattern=NO_NUL, max_length=600)]
"""An id or a name in the path, not yet looked up."""
QueryText = Annotated[str | None, Query(pattern=NO_NUL, max_length=600)]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS)]
After = Annotated[str | None, Query(pattern=NO_NUL, max_length=200)]
"""Id of the last row of the page before."""
AfterNumber = Annotated[int, Query(ge=0, le=2**31 - 1)]
IfMatch = Annotated[str | None, Header(max_length=100)]
IdempotencyKey = Annotated[str | None, Header(max_length=200)]
Reason = Annotated[PlainText, Field(max_length=500)]


class Listed(BaseModel, Generic[T]):
    """A page of rows in order of their ids. ``next`` is what the next page asks for as ``after``; null on the last one."""

    items: list[T]
    next: str | None = None


class ReasonBody(RequestModel):
    """Reason for what an operator does."""

    reason: Reason = ""


def operator_body(model: type[RequestModel]) -> Any:
    """Return a dependency that yields the body as ``model``, once the operator is known. Raises as ``parse_json``."""

    @reads(model)
    async def parse(request: Request, admin: Admin, operator: Caller) -> RequestModel:
        del operator
        idle = admin.runtime.settings.body_timeout.total_seconds()
        raw = await read_body(request, SMALL_BODY, idle_seconds=idle)
        return parse_json(model, expanded(raw, SMALL_BODY))

    return Depends(parse)


def listed(rows: list[T], limit: int, ids: list[str]) -> Listed[T]:
    """Return the page of at most ``limit`` of the rows. One row more than that says that there is a next page."""
    return Listed(items=rows[:limit], next=ids[limit - 1] if len(rows) > limit else None)


def version_of(body: BaseModel) -> str:
    """Return the version of a resource as its ``ETag``: a digest of what an operator sees of it."""
    return f'"{hashlib.sha256(body.model_dump_json().encode()).hexdigest()[:32]}"'


def check_version(given: str | None, body: BaseModel) -> None:
    """Raise ``EditConflict`` unless ``If-Match`` names the resource as it is, and ``InvalidRequest`` without one."""
    if given is None:
        raise InvalidRequest("this change needs If-Match with the ETag of what you have read, or * for any state")
    if given != "*" and version_of(body) not in [one.strip() for one in given.split(",")]:
        raise EditConflict("somebody has changed this since you read it; read it again and repeat the change")
