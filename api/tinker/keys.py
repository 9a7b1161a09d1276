"""The caller's own key: what ``tinker auth login`` and ``logout`` ask."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from api.services import Caller, Services
from tenants.keys import describe_key, revoke_key

router = APIRouter(tags=["keys"])


class OrganisationDetails(BaseModel):
    """The tenant, in the CLI's words."""

    name: str


class UserDetails(BaseModel):
    """weft knows tenants, not people."""

    email: str = ""


class KeyDetails(BaseModel):
    """Whose key it is."""

    org_details: OrganisationDetails
    user_details: UserDetails


class KeyInfo(BaseModel):
    """Public facts of an API key; ``name`` is its shown prefix."""

    key_id: int
    name: str
    note: str
    details: KeyDetails


def _presented_key(request: Request) -> str:
    return request.headers["x-api-key"]


@router.get("/auth/apikey/me")
async def get_own_key(caller: Caller, services: Services, request: Request) -> KeyInfo:
    """Facts of the key in ``X-API-Key``."""
    async with services.database.read() as session:
        key, tenant = await describe_key(session, caller, _presented_key(request))
    return KeyInfo(
        key_id=key.id,
        name=key.prefix,
        note=key.note,
        details=KeyDetails(org_details=OrganisationDetails(name=tenant.name), user_details=UserDetails()),
    )


@router.delete("/auth/apikey/me", status_code=204)
async def revoke_own_key(_caller: Caller, services: Services, request: Request) -> None:
    """Revoke the key in ``X-API-Key``, and no other, at once."""
    async with services.database.write() as transaction:
        await revoke_key(transaction, prefix=_presented_key(request), clock=services.clock)
