"""``weft key``: makes, lists, bounds, rotates and revokes tenants' API keys."""

from datetime import datetime, timedelta
from typing import Annotated, Literal

import typer

from api.admin.bodies import Listed
from api.admin.keys import OperatorsKeyBody
from api.key_records import MadeKey, NewKeyLimits, NewKeyRequest, RotateRequest
from cli.admin_client import AdminClient
from cli.admin_command import Done, Shown, admin_command
from cli.tenants import find_tenant, parsed_limit, path_of
from cli.times import moment, span
from contracts.errors import NotFound
from store.clock import utc_now
from tenants.key_text import shown_prefix
from tenants.rights import SCOPES_OF_ROLES, Role, Scope

app = typer.Typer()

_NONE = "none"
_UNUSED = timedelta(days=90)
"""Age of the last use from which a list says that a key is unused."""

TenantOption = Annotated[str, typer.Option(help="Name of the tenant.")]
TenantRole = Literal["viewer", "member", "billing", "admin"]
KeyArgument = Annotated[str, typer.Argument(help="The key, or its first part as `weft key list` shows it.")]


@admin_command(app, "create")
def create(
    admin: AdminClient,
    tenant: TenantOption = "default",
    note: Annotated[str, typer.Option(help="Purpose of the key.")] = "",
    role: Annotated[TenantRole, typer.Option(help="Role of the key.")] = "member",
    scope: Annotated[list[Scope] | None, typer.Option(help="Scope that the role keeps; repeatable. None: all.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="Project that the key is for; repeatable.")] = None,
    expires: Annotated[str, typer.Option(help="End of the key: 30d, or 2027-01-31.")] = "",
    base: Annotated[list[str] | None, typer.Option(help="Base model that the key is for; repeatable.")] = None,
    max_rank: Annotated[int | None, typer.Option(help="Highest rank of adapters that the key makes.")] = None,
    network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="Addresses that the key may be used from; repeatable.")
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A rate of the key within its tenant's; repeatable.")
    ] = None,
) -> Shown:
    """Make a key. It is shown only once."""
    asked = NewKeyRequest(
        note=note,
        role=Role(role),
        scopes=scope or None,
        projects=project or None,
        expires_at=moment(expires, "--expires", utc_now()) if expires else None,
        base_models=base or None,
        max_rank=max_rank,
        networks=network or None,
        limits={name: value for name, value in map(parsed_limit, limit or ()) if value is not None} or None,
    )
    made = admin.send("POST", path_of(admin, tenant, "keys"), MadeKey, asked)
    return Shown(made, [made.secret])


@admin_command(app, "list")
def list_all(admin: AdminClient, tenant: TenantOption = "default") -> Shown:
    """List a tenant's keys: first characters, state, role and bounds, creation, last use, note."""
    found = admin.every("/keys", OperatorsKeyBody, tenant_id=find_tenant(admin, tenant).id)
    return Shown(Listed(items=found), [_line(key, utc_now()) for key in found])


@admin_command(app, "rotate")
def rotate(
    admin: AdminClient,
    key: KeyArgument,
    grace: Annotated[str, typer.Option(help="Time for which the old key goes on: 0s, 45m, 12h.")] = "1h",
) -> Shown:
    """Make a key with the same rights, and end the old one after the grace time. The new one is shown only once."""
    asked = RotateRequest(grace_seconds=int(span(grace, "--grace").total_seconds()))
    made = admin.send("POST", f"/keys/{_find(admin, key).key_id}/rotation", MadeKey, asked)
    return Shown(made, [made.secret])


@admin_command(app, "set")
def set_limits(
    admin: AdminClient,
    key: KeyArgument,
    limit: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="A rate of the key within its tenant's; VALUE may be `default`."),
    ],
) -> Shown:
    """Give a key rates of its own, within its tenant's, and print all that it has. Rotated keys share them."""
    change = NewKeyLimits(limits=dict(parsed_limit(one) for one in limit))
    found = admin.send("PUT", f"/keys/{_find(admin, key).key_id}/limits", OperatorsKeyBody, change)
    return Shown(found, [f"limit {name}\t{value}" for name, value in sorted(found.limits.items())] or ["no limits"])


@admin_command(app, "revoke")
def revoke(admin: AdminClient, key: KeyArgument) -> Shown:
    """Revoke a key, and end its samples, at once."""
    admin.delete(f"/keys/{_find(admin, key).key_id}")
    return Shown(Done(done="revoked"), ["revoked"])


def _find(admin: AdminClient, key: str) -> OperatorsKeyBody:
    """Return the key with this text or first part. Only that part is sent. Raises ``NotFound``."""
    prefix = shown_prefix(key)
    found = admin.page("/keys", OperatorsKeyBody, prefix=prefix).items
    if not found:
        raise NotFound(f"no key starts with {prefix!r}; `weft key list` shows them")
    return found[0]


def _line(key: OperatorsKeyBody, now: datetime) -> str:
    of_role = sorted(SCOPES_OF_ROLES.get(key.role, ()))
    bounds = [
        *(f"scope={name}" for name in (key.scopes or [_NONE] if key.scopes != of_role else [])),
        *(f"project={name}" for name in key.projects or ()),
        *(f"base={name}" for name in key.base_models or ()),
        *([] if key.max_rank is None else [f"max-rank={key.max_rank}"]),
        *(f"network={name}" for name in key.networks or ()),
        *(f"{name}={value}" for name, value in sorted(key.limits.items())),
        *([] if key.expires_at is None else [f"expires={key.expires_at:%Y-%m-%dT%H:%M:%SZ}"]),
    ]
    rows = (f"{key.prefix}-…", _state(key, now), " ".join([key.role, *bounds]), f"{key.created_at:%Y-%m-%d %H:%M}")
    return "\t".join([*rows, _use(key, now), key.note])


def _state(key: OperatorsKeyBody, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "live"


def _use(key: OperatorsKeyBody, now: datetime) -> str:
    if key.last_used_at is None:
        return "never used"
    told = f"used {key.last_used_at:%Y-%m-%d %H:%M}"
    return f"{told} (unused for {_UNUSED.days} days)" if key.last_used_at < now - _UNUSED else told
