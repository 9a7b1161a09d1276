"""Keys of tenants for operators: list, find, make, bound, rotate and revoke them."""

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Request

from api.admin.acts import record_operator
from api.admin.bodies import AfterNumber, IdempotencyKey, Limit, Listed, PathId, QueryText, listed, operator_body
from api.admin.notes import note_done
from api.admin.services import Admin, Caller
from api.admin.tenants import find_row, repeatable_by
from api.key_records import KeyBody, KeyNumber, MadeKey, NewKeyLimits, NewKeyRequest, RotateRequest, key_body
from contracts.errors import NotFound
from contracts.ids import TenantId
from ledger.cancellation import OfKeys
from ledger.ended_keys import key_ended
from store.tables import ApiKey
from telemetry.security import SecurityEvent
from tenants.audit import rights_told
from tenants.audit_actions import Action
from tenants.key_holds import hold_operator
from tenants.key_text import shown_prefix
from tenants.keys import create_key, revoke_key, rotate_key, set_key_limits
from tenants.pages import page_of
from tenants.projects import find_projects
from tenants.rights import KeyRights

router = APIRouter(tags=["keys"])


class OperatorsKeyBody(KeyBody):
    """A tenant's key without its secret, with its tenant's id.

    ``payer`` is the number of the key whose budgets and rates it spends of: its own, or that of the first that shares them.
    """

    tenant_id: str
    payer: int | None = None


@router.get("/keys")
async def list_keys(
    caller: Caller,
    admin: Admin,
    tenant_id: QueryText = None,
    prefix: QueryText = None,
    after: AfterNumber = 0,
    limit: Limit = 50,
) -> Listed[OperatorsKeyBody]:
    """List keys, ended ones included: a tenant's, or the one that begins with ``prefix``."""
    del caller
    conditions = [] if tenant_id is None else [ApiKey.tenant_id == tenant_id]
    conditions += [] if prefix is None else [ApiKey.prefix == shown_prefix(prefix)]
    async with admin.runtime.database.survey() as session:
        rows = await page_of(session, ApiKey, *conditions, after=after, most=limit + 1)
    return listed([_body(row) for row in rows], limit, [str(row.id) for row in rows])


@router.post("/tenants/{tenant_id}/keys", status_code=201)
async def make_key(
    caller: Caller,
    admin: Admin,
    request: Request,
    tenant_id: PathId,
    body: Annotated[NewKeyRequest, operator_body(NewKeyRequest)],
    idempotency_key: IdempotencyKey = None,
) -> MadeKey:
    """Make a key of a tenant. A repeat with the same ``Idempotency-Key`` returns the first one's key.

    Raises ``NotFound``, ``InvalidRequest``, ``Forbidden`` for an unknown project, ``SequenceConflict`` for a repeat that asks for
    another key.
    """
    async with admin.runtime.database.write() as transaction:
        await hold_operator(transaction, caller, admin.runtime.clock())
        # Locked: repeats come one after the other.
        tenant = TenantId((await find_row(transaction, tenant_id, for_change=True)).id)
        projects = None if body.projects is None else await find_projects(transaction, tenant, body.projects)
        rights = KeyRights(
            role=body.role,
            scopes=None if body.scopes is None else frozenset(body.scopes),
            projects=projects,
            expires_at=body.expires_at,
            base_models=None if body.base_models is None else frozenset(body.base_models),
            max_rank=body.max_rank,
            networks=None if body.networks is None else tuple(body.networks),
            limits=body.limits or None,
        )
        made = await create_key(
            transaction,
            tenant=tenant,
            note=body.note,
            clock=admin.runtime.clock,
            rights=rights,
            repeatable=repeatable_by(admin, caller, f"keys/{tenant}", idempotency_key),
        )
        if not made.is_repeat:
            told = rights_told(rights, body.note)
            await record_operator(
                transaction, admin, request, caller, Action.KEY_CREATE, made.prefix, tenant=tenant, after=told
            )
    note_done(request, caller, SecurityEvent.KEY_CREATED, made.prefix, tenant=tenant)
    return MadeKey(key_id=made.id, prefix=made.prefix, secret=made.secret)


@router.post("/keys/{key_id}/rotation", status_code=201)
async def rotate(
    caller: Caller,
    admin: Admin,
    request: Request,
    key_id: KeyNumber,
    body: Annotated[RotateRequest, operator_body(RotateRequest)],
    idempotency_key: IdempotencyKey = None,
) -> MadeKey:
    """Make a key with the same rights; the old one ends after the grace time.

    A repeat with the same ``Idempotency-Key`` returns the first one's key. Raises ``NotFound``, ``InvalidRequest`` for a key
    that has ended.
    """
    async with admin.runtime.database.write() as transaction:
        await hold_operator(transaction, caller, admin.runtime.clock())
        found = await transaction.get(ApiKey, key_id, with_for_update=True)
        if found is None:
            raise _no_key(key_id)
        made = await rotate_key(
            transaction,
            found,
            grace=timedelta(seconds=body.grace_seconds),
            clock=admin.runtime.clock,
            repeatable=repeatable_by(admin, caller, f"rotation/{key_id}", idempotency_key),
        )
        if not made.is_repeat:
            told = {"new_key": made.prefix, "old_key_expires_at": found.expires_at}
            await record_operator(
                transaction, admin, request, caller, Action.KEY_ROTATE, found.prefix, tenant=found.tenant_id, after=told
            )
    note_done(request, caller, SecurityEvent.KEY_CREATED, made.prefix, tenant=found.tenant_id)
    return MadeKey(key_id=made.id, prefix=made.prefix, secret=made.secret)


@router.put("/keys/{key_id}/limits")
async def change_key_limits(
    caller: Caller,
    admin: Admin,
    request: Request,
    key_id: KeyNumber,
    body: Annotated[NewKeyLimits, operator_body(NewKeyLimits)],
) -> OperatorsKeyBody:
    """Give a key rates of its own, within its tenant's. They hold from its next request on.

    Keys that took one another's place share them. Raises ``NotFound``, ``InvalidRequest``.
    """
    async with admin.runtime.database.write() as transaction:
        found = await transaction.get(ApiKey, key_id, with_for_update=True)
        if found is None:
            raise _no_key(key_id)
        changed = await set_key_limits(transaction, found, body.limits, admin.runtime.clock)
        for prefix, own in changed.before.items():
            await record_operator(
                transaction,
                admin,
                request,
                caller,
                Action.KEY_SET,
                prefix,
                tenant=found.tenant_id,
                before={"limits": own},
                after={"limits": changed.limits},
            )
        await transaction.refresh(found)
        return _body(found)


@router.delete("/keys/{key_id}", status_code=204)
async def revoke(caller: Caller, admin: Admin, request: Request, key_id: KeyNumber) -> None:
    """Revoke a key, and end its samples, at once. Raises ``NotFound``."""
    async with admin.runtime.database.write() as transaction:
        found = await transaction.get(ApiKey, key_id)
        if found is None:
            raise _no_key(key_id)
        revoked = await revoke_key(transaction, prefix=found.prefix, clock=admin.runtime.clock)
        await admin.runtime.ledger.cancel(
            transaction, OfKeys(revoked.tenant, [revoked.id]), key_ended(), only_samples=True
        )
        if revoked.was_live:
            await record_operator(
                transaction, admin, request, caller, Action.KEY_REVOKE, revoked.prefix, tenant=revoked.tenant
            )
    note_done(request, caller, SecurityEvent.KEY_REVOKED, revoked.prefix, tenant=revoked.tenant)


def _no_key(key_id: int) -> NotFound:
    return NotFound(f"no key {key_id}; `weft key list` shows them")


def _body(row: ApiKey) -> OperatorsKeyBody:
    return OperatorsKeyBody(**key_body(row).model_dump(), tenant_id=row.tenant_id, payer=row.budget_key or row.id)
