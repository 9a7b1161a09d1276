"""Bodies of API keys, for tenants' administrators and for operators."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field

from api.wire.request_model import PlainText, RequestModel, UtcTime
from store.tables import ApiKey
from tenants.key_reader import rights_of
from tenants.rights import Role, Scope

_MOST = 50

Texts = Annotated[list[Annotated[PlainText, Field(max_length=200)]], Field(min_length=1, max_length=_MOST)]
KeyNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]


KeyLimits = Annotated[dict[Annotated[str, Field(max_length=100)], int], Field(max_length=50)]


class NewKeyRequest(RequestModel):
    """Rights of a key to make; null is no bound of its own, and the caller's bounds hold for it in any case.

    - ``projects``: ids or names of the projects that the key reaches.
    - ``networks``: addresses that the key may be used from, as CIDR.
    - ``limits``: rates of the key, by the names of its tenant's.
    """

    note: Annotated[PlainText, Field(max_length=200)] = ""
    role: Role = Role.MEMBER
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=_MOST)] | None = None
    projects: Texts | None = None
    expires_at: UtcTime | None = None
    base_models: Texts | None = None
    max_rank: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    networks: Texts | None = None
    limits: KeyLimits | None = None


class NewKeyLimits(RequestModel):
    """Rates of a key to set, by name; null for none. Those that are not named stay."""

    limits: Annotated[dict[Annotated[str, Field(max_length=100)], int | None], Field(max_length=50)]


class RotateRequest(RequestModel):
    """Rotation of a key, which goes on for ``grace_seconds`` beside the new one."""

    grace_seconds: Annotated[int, Field(ge=0, le=30 * 86400)] = 3600


class KeyBody(BaseModel):
    """A key without its secret. ``last_used_at`` is a minute; null: never used. ``limits``: rates of its own."""

    key_id: int
    prefix: str
    note: str
    role: Role
    scopes: list[str]
    projects: list[str] | None
    base_models: list[str] | None
    max_rank: int | None
    networks: list[str] | None
    limits: dict[str, int]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class MadeKey(BaseModel):
    """A key that was made. ``secret`` is the whole key, shown only here and in a repeat with the same Idempotency-Key."""

    key_id: int
    prefix: str
    secret: str


def key_body(row: ApiKey) -> KeyBody:
    """Return the body of a row of ``api_keys``."""
    rights = rights_of(row)
    return KeyBody(
        key_id=row.id,
        prefix=row.prefix,
        note=row.note,
        role=rights.role,
        scopes=sorted(rights.effective_scopes),
        projects=_list(rights.projects),
        base_models=_list(rights.base_models),
        max_rank=rights.max_rank,
        networks=_list(rights.networks),
        limits=dict(rights.limits or {}),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def _list(values: frozenset[str] | tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else sorted(values)
