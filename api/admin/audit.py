"""The audit log for operators: every tenant's entries and the service's own."""

from datetime import UTC, date, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict

from api.admin.acts import record_operator
from api.admin.bodies import After, Limit, Listed, QueryText
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row
from api.wire.request_model import NO_NUL, UtcTime
from contracts.ids import TenantId
from store.tables import AuditEntry
from tenants.audit_actions import Action
from tenants.audit_digests import verify
from tenants.audit_log import AuditFilter, read_entries

router = APIRouter(tags=["audit"])

Kind = Annotated[str, Query(max_length=100, pattern=NO_NUL)]


class AuditEntryBody(BaseModel):
    """An entry. ``tenant_id`` null: about the service itself."""

    id: int
    at: datetime
    tenant_id: str | None
    actor: str
    key_id: int | None
    role: str | None
    door: str
    action: str
    resource: str
    resource_id: str
    project: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    address: str | None
    trace_id: str | None
    outcome: str


class AuditDigestBody(BaseModel):
    """Digest of a day's entries."""

    model_config = ConfigDict(from_attributes=True)

    day: date
    entries: int
    digest: str


class AuditVerification(BaseModel):
    """Outcome of a look at every day's digest.

    - ``expired_to``: last day whose entries are gone by age.
    - ``last``: the newest digest. Keep it elsewhere: it is what shows that the last days were not cut off.
    - ``problems``: a line for each day that is not as it was written.
    """

    days: int
    entries: int
    expired_to: date | None
    last: AuditDigestBody | None
    problems: list[str]


@router.get("/audit/verification")
async def verify_audit(caller: Caller, admin: Admin) -> AuditVerification:
    """Compute every day's digest again, and tell whether an entry was changed, added or removed. Takes a while."""
    del caller
    runtime = admin.runtime
    kept_since = (await admin.now() - runtime.settings.retention_audit).astimezone(UTC).date()
    async with runtime.database.survey() as session:
        found = await verify(session, kept_since=kept_since)
    return AuditVerification.model_validate(found, from_attributes=True)


@router.get("/audit")
async def list_entries(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant: QueryText = None,
    action: Annotated[list[Action] | None, Query()] = None,
    resource: Annotated[list[Kind] | None, Query(max_length=50)] = None,
    key: QueryText = None,
    since: UtcTime | None = None,
    until: UtcTime | None = None,
    limit: Limit = 50,
    after: After = None,
) -> Listed[AuditEntryBody]:
    """List entries, the newest first: about a tenant by its id, of these actions or resources, by this key. Raises ``NotFound``.

    A look makes an entry itself, with its first page.
    """
    database = admin.runtime.database
    async with database.survey() as session:
        owner = None if tenant is None else TenantId((await find_row(session, tenant)).id)
        which = AuditFilter(
            owner=None, tenant=owner, actions=action, resources=resource, key=key, since=since, until=until
        )
        page = await read_entries(session, which, most=limit, cursor=after)
    if after is None:
        async with database.write() as transaction:
            await record_operator(transaction, admin, request, caller, Action.AUDIT_READ, "audit", tenant=owner)
    return Listed(items=[_body(entry) for entry in page.entries], next=page.next)


def _body(entry: AuditEntry) -> AuditEntryBody:
    return AuditEntryBody.model_validate(entry, from_attributes=True)
