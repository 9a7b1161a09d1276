"""Endpoints of the caller's own API key: describe, revoke, and exchange for a token that stands for it."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.acting import record_act
from api.authentication import AnyKey
from api.presented_key import presented_key
from api.route_bounds import bounded
from api.security_events import note_access
from api.services import Services
from contracts.errors import Unauthenticated
from ledger.cancellation import OfKeys
from ledger.ended_keys import key_ended
from telemetry.security import SecurityEvent
from tenants.audit_actions import Action
from tenants.keys import client_token, describe_key, revoke_key
from tenants.signed_tokens import TOKEN_PREFIX

router = APIRouter(tags=["keys"])


class OrganisationDetails(BaseModel):
    """The tenant; the SDK's command line calls it an organisation."""

    name: str


class UserDetails(BaseModel):
    """The user, always empty: weft knows tenants, not people."""

    email: str = ""


class KeyDetails(BaseModel):
    """Owner of a key."""

    org_details: OrganisationDetails
    user_details: UserDetails


class KeyInfo(BaseModel):
    """Public facts of an API key; ``name`` is the key's prefix, which is no secret."""

    key_id: int
    name: str
    note: str
    details: KeyDetails


class ClientToken(BaseModel):
    """A JSON Web Token that stands for the key."""

    jwt: str


@router.post("/auth/token")
@bounded(is_counted=False)
async def exchange_key(caller: AnyKey, services: Services, request: Request) -> ClientToken:
    """Return a token that may be sent in place of the key for an hour, or until the key is revoked.

    Raises ``Unauthenticated`` for a token: a stolen one cannot be renewed.
    """
    if (presented_key(request.headers) or "").startswith(TOKEN_PREFIX):
        raise Unauthenticated("a token cannot be exchanged for another; send the tml-… key itself")
    async with services.runtime.database.read() as session:
        key, tenant = await describe_key(session, caller.tenant, caller.key_id)
    return ClientToken(jwt=client_token(services.signer, key, tenant))


@router.get("/auth/apikey/me")
@bounded(is_counted=False)
async def get_own_key(caller: AnyKey, services: Services) -> KeyInfo:
    """Describe the key that the request carries."""
    async with services.runtime.database.read() as session:
        key, tenant = await describe_key(session, caller.tenant, caller.key_id)
    return KeyInfo(
        key_id=key.id,
        name=key.prefix,
        note=key.note,
        details=KeyDetails(org_details=OrganisationDetails(name=tenant.name), user_details=UserDetails()),
    )


@router.delete("/auth/apikey/me", status_code=204)
@bounded(is_counted=False)
async def revoke_own_key(caller: AnyKey, services: Services, request: Request) -> None:
    """Revoke the key that the request carries, and end its samples, at once; other keys stay."""
    runtime = services.runtime
    async with runtime.database.write() as transaction:
        own, _ = await describe_key(transaction, caller.tenant, caller.key_id)
        revoked = await revoke_key(transaction, prefix=own.prefix, clock=runtime.clock)
        await runtime.ledger.cancel(transaction, OfKeys(revoked.tenant, [revoked.id]), key_ended(), only_samples=True)
        if revoked.was_live:
            await record_act(transaction, services, caller, Action.KEY_REVOKE, revoked.prefix)
    note_access(request, SecurityEvent.KEY_REVOKED, revoked.prefix, actor=revoked.prefix)
