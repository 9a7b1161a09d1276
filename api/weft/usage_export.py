"""``GET /usage/export``: a tenant's usage as a document for systems that make bills."""

from collections.abc import AsyncIterator
from datetime import timedelta

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from api.authentication import BillingReader
from api.endable_response import EndableResponse
from api.request_body import off_loop
from api.security_events import note_read
from api.services import Services
from api.wire.request_model import UtcTime
from contracts.errors import InvalidRequest
from tenants.audit_actions import Action
from tenants.usage_documents import FINAL_BEFORE, MEDIA_TYPES, Document, header
from tenants.usage_documents import lines as lines_of
from tenants.usage_exports import final_before, usage_records

router = APIRouter(tags=["usage"])

LONGEST_EXPORT = timedelta(days=400)
_BYTES_OF_A_RECORD = 1024
_ENDINGS = {Document.FOCUS: "csv", Document.CLOUDEVENTS: "ndjson"}


@router.get("/usage/export", response_class=StreamingResponse)
async def export_usage(
    caller: BillingReader,
    services: Services,
    request: Request,
    since: UtcTime,
    before: UtcTime | None = None,
    format: Document = Document.FOCUS,
) -> Response:
    """Return the caller's usage of the hours from ``since`` on and before ``before`` for a bill: a record for each meter.

    Hours that may still change are left out; the header ``weft-final-before`` has the first of them. ``focus`` is FOCUS 1.2
    as CSV, ``cloudevents`` a CloudEvent a line. Raises ``InvalidRequest`` for a window of more than 400 days.
    """
    note_read(request, caller, Action.USAGE_READ)
    now = services.runtime.clock()
    end = min(before or now, now)
    if end - since > LONGEST_EXPORT:
        raise InvalidRequest(f"an export has at most {LONGEST_EXPORT.days} days; ask for fewer at once")
    database, owner = services.runtime.database, caller.reach
    async with database.read() as session:
        final = await final_before(session, now)
    records = usage_records(database, owner, since=since, before=min(end, final))

    async def made() -> AsyncIterator[str]:
        yield header(format)
        async for page in records:
            yield await off_loop(services, caller.tenant, _BYTES_OF_A_RECORD * len(page), lines_of, format, page)

    headers = {
        "content-disposition": f'attachment; filename="usage.{_ENDINGS[format]}"',
        FINAL_BEFORE: final.isoformat(),
    }
    document = StreamingResponse(made(), media_type=MEDIA_TYPES[format], headers=headers)
    return EndableResponse(document, services.ended_keys.of(caller.tenant, caller.key_id))
