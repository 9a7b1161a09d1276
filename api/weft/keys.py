"""Endpoints of a tenant's API keys: list, make, bound, rotate, revoke.

Nobody gives away more than the own key may: a key that is made, rotated or revoked has no right beyond those of the caller.
So a key with a budget or rates makes keys that share them, and manages no others.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession

from api.acting import record_act
from api.authentication import AnyKey, KeyAdmin
from api.json_body import json_body
from api.key_records import KeyBody, KeyNumber, MadeKey, NewKeyLimits, NewKeyRequest, RotateRequest, key_body
from api.long_lists import encoded_list, long_answer
from api.route_bounds import bounded
from api.security_events import note_access
from api.services import ApiServices, Services
from contracts.errors import Forbidden, InvalidRequest
from ledger.cancellation import OfKeys
from ledger.ended_keys import key_ended
from store.tables import ApiKey
from telemetry.security import SecurityEvent
from tenants.audit import rights_told
from tenants.audit_actions import Action
from tenants.budgets import has_budget
from tenants.key_holds import hold_keys
from tenants.key_reader import rights_of
from tenants.keys import (
    Repeatable,
    check_rights,
    create_key,
    pages_of_keys,
    revoke_key,
    rotate_key,
    set_key_limits,
    sharing_keys,
)
from tenants.projects import find_projects
from tenants.rights import KeyRights, Principal, Scope, Via

router = APIRouter(tags=["keys"])

_LEAST_OWN_GRACE = 60
"""Seconds in which a key that rotates itself can repeat the request. Without them a lost answer would leave no key."""
IdempotencyKey = Annotated[str | None, Header(max_length=200)]


class KeyList(BaseModel):
    """Keys, oldest first."""

    keys: list[KeyBody]


@router.get("/keys", response_model=KeyList)
async def list_own_keys(caller: KeyAdmin, services: Services) -> Response:
    """List the tenant's keys, ended ones included."""
    async with services.runtime.database.survey() as session:
        pages = pages_of_keys(session, caller.tenant)
        listed = await encoded_list(pages, lambda row: key_body(row).model_dump(mode="json"))
    return long_answer(keys=listed)


async def own_key_bodies(caller: KeyAdmin, services: Services) -> list[KeyBody]:
    """Return the tenant's keys, ended ones included, as records."""
    async with services.runtime.database.survey() as session:
        return [key_body(row) async for page in pages_of_keys(session, caller.tenant) for row in page]


@router.post("/keys", status_code=201)
async def make_key(
    caller: KeyAdmin,
    services: Services,
    request: Request,
    body: Annotated[NewKeyRequest, json_body(NewKeyRequest)],
    idempotency_key: IdempotencyKey = None,
) -> MadeKey:
    """Make a key. A repeat with the same ``Idempotency-Key`` returns the first one's key.

    Raises ``Forbidden`` for rights beyond the caller's, ``InvalidRequest``, ``SequenceConflict``.
    """
    _check_is_key(caller)
    repeatable = _repeatable(services, caller, "create", idempotency_key)
    async with services.runtime.database.write() as transaction:
        # Repeats come one after the other.
        caller, _ = await hold_keys(transaction, caller, services.runtime.clock())
        caller.check_new_work()
        rights = await _rights(transaction, caller, body, services.runtime.clock())
        made = await create_key(
            transaction,
            tenant=caller.tenant,
            note=body.note,
            clock=services.runtime.clock,
            rights=rights,
            repeatable=repeatable,
            defaults=services.limits,
            payer=await _shared_payer(transaction, caller, body),
        )
        if not made.is_repeat:
            told = rights_told(rights, body.note)
            await record_act(transaction, services, caller, Action.KEY_CREATE, made.prefix, after=told)
    note_access(request, SecurityEvent.KEY_CREATED, made.prefix)
    return MadeKey(key_id=made.id, prefix=made.prefix, secret=made.secret)


@router.post("/keys/{key_id}/rotate", status_code=201)
@bounded(goes_on=True)
async def rotate(
    caller: AnyKey,
    services: Services,
    request: Request,
    key_id: KeyNumber,
    body: Annotated[RotateRequest, json_body(RotateRequest)],
    idempotency_key: IdempotencyKey = None,
) -> MadeKey:
    """Make a key with the same rights; the old one ends after the grace time. Every key may rotate itself.

    A repeat with the same ``Idempotency-Key`` returns the first one's key. Raises ``NotFound``, ``Forbidden``,
    ``InvalidRequest`` for a key that has ended, and for one that rotates itself with a grace below a minute.
    """
    _check_is_key(caller)
    if key_id == caller.key_id and body.grace_seconds < _LEAST_OWN_GRACE:
        raise InvalidRequest(
            f"grace_seconds: a key that rotates itself goes on for {_LEAST_OWN_GRACE} seconds or more, so that it can ask again "
            f"if the answer with the new key is lost; got {body.grace_seconds}. DELETE /api/weft/v1/keys/{{key_id}}, sent with "
            "the old key, ends it sooner"
        )
    repeatable = _repeatable(services, caller, f"rotate/{key_id}", idempotency_key)
    async with services.runtime.database.write() as transaction:
        key = await _manageable(transaction, caller, key_id, services.runtime.clock())
        made = await rotate_key(
            transaction,
            key,
            grace=timedelta(seconds=body.grace_seconds),
            clock=services.runtime.clock,
            repeatable=repeatable,
            defaults=services.limits,
        )
        if not made.is_repeat:
            told = {"new_key": made.prefix, "old_key_expires_at": key.expires_at}
            await record_act(transaction, services, caller, Action.KEY_ROTATE, key.prefix, after=told)
    note_access(request, SecurityEvent.KEY_CREATED, made.prefix)
    return MadeKey(key_id=made.id, prefix=made.prefix, secret=made.secret)


@router.put("/keys/{key_id}/limits")
async def change_key_limits(
    caller: KeyAdmin,
    services: Services,
    key_id: KeyNumber,
    body: Annotated[NewKeyLimits, json_body(NewKeyLimits)],
) -> KeyBody:
    """Give a key rates of its own, within the tenant's and the caller's. They hold from its next request on.

    Keys that took one another's place, or that a key with a budget made, share them: none of those may have a right beyond the
    caller's. Raises ``NotFound``, ``Forbidden``, ``InvalidRequest``.
    """
    now = services.runtime.clock()
    async with services.runtime.database.write() as transaction:
        key = await _manageable(transaction, caller, key_id, now)
        changed = await set_key_limits(transaction, key, body.limits, services.runtime.clock)
        for one in (key, *await sharing_keys(transaction, key, now)):
            _check_within(caller.rights, replace(rights_of(one), limits=changed.limits or None))
        for prefix, own in changed.before.items():
            await record_act(
                transaction,
                services,
                caller,
                Action.KEY_SET,
                prefix,
                before={"limits": own},
                after={"limits": changed.limits},
                # One change, however many keys it is of.
                is_counted=prefix != key.prefix,
            )
        await transaction.refresh(key)
        return key_body(key)


@router.delete("/keys/{key_id}", status_code=204)
@bounded(is_counted=False)
async def revoke(caller: AnyKey, services: Services, request: Request, key_id: KeyNumber) -> None:
    """Revoke a key, and end its samples, at once. Every key may revoke itself. Raises ``NotFound``, ``Forbidden``."""
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        key = await _manageable(transaction, caller, key_id, runtime.clock())
        revoked = await revoke_key(transaction, prefix=key.prefix, clock=runtime.clock)
        await runtime.ledger.cancel(transaction, OfKeys(revoked.tenant, [revoked.id]), key_ended(), only_samples=True)
        if revoked.was_live:
            await record_act(transaction, services, caller, Action.KEY_REVOKE, revoked.prefix)
    note_access(request, SecurityEvent.KEY_REVOKED, revoked.prefix)


def _repeatable(services: ApiServices, caller: Principal, what: str, idempotency_key: str | None) -> Repeatable | None:
    if not idempotency_key:
        return None
    return Repeatable(services.signer, (caller.tenant, str(caller.key_id), what, idempotency_key))


def _check_is_key(caller: Principal) -> None:
    """Raise ``Forbidden`` for a token that stands for a key: it ends within the hour, and may not make what outlives it."""
    if caller.via is Via.TOKEN:
        raise Forbidden("a token makes no keys; send the API key itself")


async def _rights(session: AsyncSession, caller: Principal, body: NewKeyRequest, now: datetime) -> KeyRights:
    """Return the rights that are asked for, within the caller's. Raises ``Forbidden`` for more, ``InvalidRequest``."""
    own = caller.rights
    asked = KeyRights(
        role=body.role,
        scopes=own.scopes if body.scopes is None else frozenset(body.scopes),
        projects=own.projects if body.projects is None else await find_projects(session, caller.reach, body.projects),
        expires_at=body.expires_at or own.expires_at,
        base_models=own.base_models if body.base_models is None else frozenset(body.base_models),
        max_rank=body.max_rank or own.max_rank,
        networks=own.networks if body.networks is None else tuple(body.networks),
        limits=body.limits or own.limits,
    )
    check_rights(asked, now)
    _check_within(own, asked)
    return asked


async def _is_bounded(session: AsyncSession, caller: Principal) -> bool:
    return bool(caller.rights.limits) or await has_budget(session, caller.tenant, caller.payer)


async def _shared_payer(session: AsyncSession, caller: Principal, body: NewKeyRequest) -> int | None:
    """Return the key whose budgets and rates a new key shares: the caller's, if it has any. Raises ``Forbidden``."""
    if not await _is_bounded(session, caller):
        return None
    if body.limits:
        raise Forbidden("limits: a key that yours makes shares its budgets and rates; leave limits out")
    return caller.payer


async def _manageable(session: AsyncSession, caller: Principal, key_id: int, now: datetime) -> ApiKey:
    """Return the caller's own key, or another of the tenant's that may no more.

    Raises ``Forbidden``, ``NotFound``, and as ``hold_keys``.
    """
    if key_id != caller.key_id:
        caller.check(Scope.KEYS)
    key = (await hold_keys(session, caller, now, key_id))[1][key_id]
    if key_id != caller.key_id:
        _check_within(caller.rights, rights_of(key))
        if (key.budget_key or key.id) != caller.payer and await _is_bounded(session, caller):
            raise Forbidden("budget: that key does not share yours; use a key without a budget or rates of its own")
    return key


def _check_within(own: KeyRights, other: KeyRights) -> None:
    if (excess := own.excess(other)) is not None:
        raise Forbidden(f"{excess}: that key may more than yours; use a key that has all its rights")
