"""Tenants for operators: list, make, change, suspend and resume them, and see where each stands."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from api.admin.acts import record_operator
from api.admin.bodies import (
    After,
    IdempotencyKey,
    IfMatch,
    Limit,
    Listed,
    PathId,
    QueryText,
    Reason,
    check_version,
    listed,
    operator_body,
    version_of,
)
from api.admin.notes import note_done
from api.admin.services import Admin, AdminServices, Caller
from api.key_records import MadeKey
from api.standing_records import StandingReport, standing_report
from api.wire.request_model import MapOf, PlainText, RequestModel
from contracts.errors import NotFound, SequenceConflict
from contracts.ids import TenantId
from contracts.service_class import ServiceClass, known_class
from ledger.wakeups import gates_topic, sampling_topic, shares_topic, trainer_topic
from store.database import after_commit
from store.tables import ApiKey, ProcessKind, Tenant, WorkerProcess
from telemetry.security import SecurityEvent
from tenants.audit import rights_told
from tenants.audit_actions import Action
from tenants.key_holds import hold_operator
from tenants.key_text import key_text
from tenants.keys import Repeatable, create_key
from tenants.limits import Counted, hold_count, set_tenant
from tenants.operator_keys import Operator
from tenants.pages import page_of
from tenants.rights import KeyRights, Role, SuspendMode, known_mode
from tenants.standing import standing
from tenants.suspensions import resume_tenant, suspend_tenant
from tenants.tenant_names import create_tenant

router = APIRouter(tags=["tenants"])

_FIRST_NOTE = "made with the tenant"


class SuspensionBody(BaseModel):
    """A suspension. ``reason`` is what the tenant's clients read."""

    mode: SuspendMode
    since: datetime
    reason: str | None


class TenantBody(BaseModel):
    """A tenant. ``limits`` has only the values of its own; ``suspension`` is null while it works.

    What it has is removed from ``delete_at`` on; ``deleted_at`` is when nothing was left.
    """

    id: str
    name: str
    created_at: datetime
    share: float
    service_class: ServiceClass
    limits: dict[str, int]
    suspension: SuspensionBody | None
    delete_at: datetime | None
    deleted_at: datetime | None


class NewTenant(RequestModel):
    """Name of a tenant to make."""

    name: Annotated[PlainText, Field(min_length=1, max_length=100)]


class MadeTenant(BaseModel):
    """A tenant that was made, with its first key: an administrator's, shown only here and in a repeat of the request."""

    tenant: TenantBody
    key: MadeKey


class TenantChange(RequestModel):
    """Change of a tenant; null leaves it as it is. A limit of null goes back to the setting's value."""

    share: float | None = None
    service_class: ServiceClass | None = None
    limits: MapOf[Annotated[int, Field(ge=-(2**63), lt=2**63)] | None] | None = None


class NewSuspension(RequestModel):
    """Suspension of a tenant: its mode, and the reason that its clients read."""

    mode: SuspendMode = SuspendMode.HOLD
    reason: Reason = ""


@router.get("/tenants")
async def list_tenants(
    caller: Caller, admin: Admin, name: QueryText = None, after: After = None, limit: Limit = 50
) -> Listed[TenantBody]:
    """List tenants; with ``name`` the one of that name, if there is one."""
    del caller
    conditions = [] if name is None else [Tenant.name == name]
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, Tenant, *conditions, after=after, most=limit + 1)
    return listed([tenant_body(row) for row in rows], limit, [row.id for row in rows])


@router.post("/tenants", status_code=201)
async def make_tenant(
    caller: Caller,
    admin: Admin,
    request: Request,
    body: Annotated[NewTenant, operator_body(NewTenant)],
    idempotency_key: IdempotencyKey = None,
) -> MadeTenant:
    """Make a tenant and its first key, an administrator's.

    A repeat with the same ``Idempotency-Key`` returns the first one's. Raises ``InvalidRequest`` for a name that is taken,
    ``SequenceConflict`` for a repeat with another name.
    """
    repeatable = repeatable_by(admin, caller, "tenants", idempotency_key)
    async with admin.runtime.database.write() as transaction:
        await hold_operator(transaction, caller, admin.runtime.clock())
        await hold_count(transaction, Counted.OPERATORS, [TenantId(caller.name)])
        made = None if repeatable is None else await _made_before(transaction, repeatable, body.name)
        if made is not None:
            return made
        tenant = await create_tenant(transaction, name=body.name, clock=admin.runtime.clock)
        rights = KeyRights(Role.ADMIN)
        key = await create_key(
            transaction,
            tenant=tenant,
            note=_FIRST_NOTE,
            clock=admin.runtime.clock,
            rights=rights,
            repeatable=repeatable,
        )
        await record_operator(transaction, admin, request, caller, Action.TENANT_CREATE, tenant, tenant=tenant)
        told = rights_told(rights, _FIRST_NOTE)
        await record_operator(
            transaction, admin, request, caller, Action.KEY_CREATE, key.prefix, tenant=tenant, after=told
        )
        shown = tenant_body(await find_row(transaction, tenant))
    note_done(request, caller, SecurityEvent.TENANT_CREATED, body.name, tenant=tenant)
    note_done(request, caller, SecurityEvent.KEY_CREATED, key.prefix, tenant=tenant)
    return MadeTenant(tenant=shown, key=MadeKey(key_id=key.id, prefix=key.prefix, secret=key.secret))


@router.get("/tenants/{tenant_id}")
async def show_tenant(caller: Caller, admin: Admin, response: Response, tenant_id: PathId) -> TenantBody:
    """Show a tenant. The ``ETag`` is what a change of it names as ``If-Match``. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.read() as session:
        shown = tenant_body(await find_row(session, tenant_id))
    response.headers["ETag"] = version_of(shown)
    return shown


@router.patch("/tenants/{tenant_id}")
async def change_tenant(
    caller: Caller,
    admin: Admin,
    request: Request,
    response: Response,
    tenant_id: PathId,
    body: Annotated[TenantChange, operator_body(TenantChange)],
    if_match: IfMatch = None,
) -> TenantBody:
    """Give a tenant a share, a class or limits. Limits hold from its next request on, the others from the next pass on.

    ``If-Match`` names the state that was read. Raises ``NotFound``, ``InvalidRequest``, ``EditConflict`` when that is not the
    present one.
    """
    async with admin.runtime.database.write() as transaction:
        found = await find_row(transaction, tenant_id, for_change=True)
        check_version(if_match, tenant_body(found))
        done = await set_tenant(
            transaction,
            name=found.name,
            limits=body.limits or {},
            share=body.share,
            service_class=body.service_class,
            defaults=admin.limits,
        )
        admin.runtime.wakeups.announce_after_commit(transaction, shares_topic())
        await record_operator(
            transaction,
            admin,
            request,
            caller,
            Action.TENANT_SET,
            found.id,
            tenant=found.id,
            before=done.before,
            after=done.after,
        )
        shown = tenant_body(await find_row(transaction, tenant_id))
    response.headers["ETag"] = version_of(shown)
    return shown


@router.put("/tenants/{tenant_id}/suspension")
async def suspend(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    body: Annotated[NewSuspension, operator_body(NewSuspension)],
) -> TenantBody:
    """Have a tenant's accepted work wait; the mode says what else is refused. Nothing is lost. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        found = await find_row(transaction, tenant_id, for_change=True)
        now = admin.runtime.clock()
        await suspend_tenant(transaction, name=found.name, reason=body.reason or None, now=now, mode=body.mode)
        told = {"mode": body.mode, "reason": body.reason or None}
        await record_operator(
            transaction, admin, request, caller, Action.TENANT_SUSPEND, found.id, tenant=found.id, after=told
        )
        await wake_workers(admin, transaction)
        shown = tenant_body(await find_row(transaction, tenant_id))
    detail = f"{body.mode}: {body.reason}"
    note_done(request, caller, SecurityEvent.TENANT_SUSPENDED, shown.name, tenant=shown.id, detail=detail)
    return shown


@router.delete("/tenants/{tenant_id}/suspension")
async def resume(caller: Caller, admin: Admin, request: Request, tenant_id: PathId) -> TenantBody:
    """Have a suspended tenant's work go on from where it is. Raises ``NotFound``."""
    now = admin.runtime.clock()
    async with admin.runtime.database.write() as transaction:
        found = await find_row(transaction, tenant_id, for_change=True)
        await resume_tenant(transaction, name=found.name, now=now)
        await record_operator(transaction, admin, request, caller, Action.TENANT_RESUME, found.id, tenant=found.id)
        await wake_workers(admin, transaction)
        shown = tenant_body(await find_row(transaction, tenant_id))
    note_done(request, caller, SecurityEvent.TENANT_RESUMED, shown.name, tenant=shown.id)
    return shown


@router.get("/tenants/{tenant_id}/standing")
async def show_standing(caller: Caller, admin: Admin, tenant_id: PathId) -> StandingReport:
    """Show a tenant's limits and its use of them, counted as they are enforced. Raises ``NotFound``."""
    del caller
    async with admin.runtime.database.survey() as session:
        found = await find_row(session, tenant_id)
        now, counted = await admin.now(), admin.request_rates
        return standing_report(await standing(session, TenantId(found.id), admin.limits, now, requests=counted))


def tenant_body(row: Tenant) -> TenantBody:
    """Return the body of a row of ``tenants``."""
    suspension = None
    if row.suspended_at is not None:
        mode = known_mode(row.suspend_mode)
        suspension = SuspensionBody(mode=mode, since=row.suspended_at, reason=row.suspend_reason)
    return TenantBody(
        id=row.id,
        name=row.name,
        created_at=row.created_at,
        share=row.share,
        service_class=known_class(row.service_class),
        limits=dict(sorted((row.limits or {}).items())),
        suspension=suspension,
        delete_at=row.delete_at,
        deleted_at=row.deleted_at,
    )


async def find_row(session: AsyncSession, tenant: str, *, for_change: bool = False) -> Tenant:
    """Return the tenant of that id, locked if it is to be changed. Raises ``NotFound``."""
    query = select(Tenant).where(Tenant.id == tenant).execution_options(populate_existing=True)
    found = await session.scalar(query.with_for_update(key_share=True) if for_change else query)
    if found is None:
        raise NotFound(f"no tenant has the id {tenant[:100]!r}; `weft tenant list` shows them")
    return found


def repeatable_by(admin: AdminServices, caller: Operator, what: str, idempotency_key: str | None) -> Repeatable | None:
    """Return the request as one that may be repeated, None without an ``Idempotency-Key``."""
    if not idempotency_key:
        return None
    return Repeatable(admin.signer, ("operator", caller.name, what, idempotency_key))


async def wake_workers(admin: AdminServices, transaction: AsyncSession) -> None:
    """Have every trainer and pool look at the tenants' suspensions, once the transaction has committed."""
    rows = await transaction.execute(select(WorkerProcess.id, WorkerProcess.kind, WorkerProcess.base_model))
    topics: set[str] = set()
    for row in rows:
        if row.kind == ProcessKind.TRAINER:
            topics.add(trainer_topic(row.id))
        elif row.kind == ProcessKind.POOL:
            topics |= {gates_topic(row.base_model), sampling_topic(row.base_model)}

    def announce() -> None:
        for topic in sorted(topics):
            admin.runtime.wakeups.announce(topic)

    after_commit(transaction, announce)


async def _made_before(session: AsyncSession, repeatable: Repeatable, name: str) -> MadeTenant | None:
    """Return what the first request with this ``Idempotency-Key`` has made. Raises ``SequenceConflict`` for another name."""
    key = await session.scalar(select(ApiKey).where(ApiKey.made_by == repeatable.id))
    if key is None:
        return None
    tenant = await find_row(session, key.tenant_id)
    if tenant.name != name:
        raise SequenceConflict("this Idempotency-Key has made a tenant of another name; send another one")
    secret = key_text(key.prefix, repeatable.secret)
    return MadeTenant(tenant=tenant_body(tenant), key=MadeKey(key_id=key.id, prefix=key.prefix, secret=secret))
