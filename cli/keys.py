"""``weft key``: makes, lists, rotates and revokes API keys."""

from datetime import datetime, timedelta
from typing import Annotated

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from cli.administration import note_event_of, on_database
from cli.options import DataOption, load_settings, run_or_explain
from cli.times import moment, span
from contracts.ids import TenantId
from store.clock import utc_now
from store.database import Database
from store.tables import ApiKey
from telemetry.security import SecurityEvent
from tenants.key_reader import rights_of
from tenants.keys import create_key, find_tenant, list_keys, named_key, revoke_key, rotate_key
from tenants.projects import find_projects
from tenants.rights import TENANT_ROLES, KeyRights, Role, Scope

app = typer.Typer(help="Make, list, rotate and revoke API keys.", no_args_is_help=True)

_UNUSED = timedelta(days=90)
"""Age of the last use from which a list says that a key is unused."""

TenantOption = Annotated[str, typer.Option(help="Name of the tenant.")]


@app.command()
def create(
    tenant: TenantOption = "default",
    note: Annotated[str, typer.Option(help="Purpose of the key.")] = "",
    role: Annotated[Role, typer.Option(help=f"One of {', '.join(TENANT_ROLES)}.")] = Role.MEMBER,
    scope: Annotated[list[Scope] | None, typer.Option(help="Scope that the role keeps; repeatable. None: all.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="Project that the key is for; repeatable.")] = None,
    expires: Annotated[str, typer.Option(help="End of the key: 30d, or 2027-01-31.")] = "",
    base: Annotated[list[str] | None, typer.Option(help="Base model that the key is for; repeatable.")] = None,
    max_rank: Annotated[int | None, typer.Option(help="Highest rank of adapters that the key makes.")] = None,
    network: Annotated[
        list[str] | None, typer.Option(metavar="CIDR", help="Addresses that the key may be used from; repeatable.")
    ] = None,
    data: DataOption = None,
) -> None:
    """Make a key. It is shown only once."""

    async def make(database: Database) -> str:
        rights = KeyRights(
            role=role,
            scopes=frozenset(scope) if scope else None,
            expires_at=moment(expires, "--expires", utc_now()) if expires else None,
            base_models=frozenset(base) if base else None,
            max_rank=max_rank,
            networks=tuple(network) if network else None,
        )
        return await new_key(database, tenant, note, rights, project)

    typer.echo(run_or_explain(lambda: on_database(load_settings(data=data), make)))


async def new_key(
    database: Database,
    tenant_name: str,
    note: str,
    rights: KeyRights | None = None,
    projects: list[str] | None = None,
) -> str:
    """Make a key of the named tenant; return its secret. Raises ``NotFound``, ``InvalidRequest``."""
    async with database.write() as transaction:
        tenant = await find_tenant(transaction, name=tenant_name)
        rights = await _of_projects(transaction, tenant, rights or KeyRights(), projects)
        key = await create_key(transaction, tenant=tenant, note=note, clock=utc_now, rights=rights)
    note_event_of(SecurityEvent.KEY_CREATED, tenant, key.prefix)
    return key.secret


async def _of_projects(
    session: AsyncSession, tenant: TenantId, rights: KeyRights, projects: list[str] | None
) -> KeyRights:
    if not projects:
        return rights
    found = await find_projects(session, tenant, projects)
    return KeyRights(
        rights.role,
        rights.scopes,
        found,
        rights.expires_at,
        rights.base_models,
        rights.max_rank,
        rights.networks,
    )


@app.command("list")
def list_all(tenant: TenantOption = "default", data: DataOption = None) -> None:
    """List a tenant's keys: first characters, state, role and bounds, creation, last use, note."""

    async def lines(database: Database) -> list[str]:
        async with database.read() as session:
            found = await find_tenant(session, name=tenant)
            return [_line(key, utc_now()) for key in await list_keys(session, tenant=found)]

    for line in run_or_explain(lambda: on_database(load_settings(data=data), lines)):
        typer.echo(line)


@app.command()
def rotate(
    key: Annotated[str, typer.Argument(help="The key, or its first part as `weft key list` shows it.")],
    grace: Annotated[str, typer.Option(help="Time for which the old key goes on: 0s, 45m, 12h.")] = "1h",
    data: DataOption = None,
) -> None:
    """Make a key with the same rights, and end the old one after the grace time. The new one is shown only once."""

    async def change(database: Database) -> str:
        async with database.write() as transaction:
            old = await named_key(transaction, key)
            made = await rotate_key(transaction, old, grace=span(grace, "--grace"), clock=utc_now)
            owner = TenantId(old.tenant_id)
        note_event_of(SecurityEvent.KEY_CREATED, owner, made.prefix)
        return made.secret

    typer.echo(run_or_explain(lambda: on_database(load_settings(data=data), change)))


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key, or its first part as `weft key list` shows it.")],
    data: DataOption = None,
) -> None:
    """Revoke a key at once."""

    run_or_explain(lambda: on_database(load_settings(data=data), lambda database: end_key(database, key)))
    typer.echo("revoked")


async def end_key(database: Database, key: str) -> None:
    """Revoke the key with this text or prefix. Raises ``NotFound``."""
    async with database.write() as transaction:
        revoked = await revoke_key(transaction, prefix=key, clock=utc_now)
    note_event_of(SecurityEvent.KEY_REVOKED, revoked.tenant, revoked.prefix)


def _line(key: ApiKey, now: datetime) -> str:
    rights = rights_of(key)
    bounds = [
        *(f"scope={name}" for name in sorted(rights.scopes or ())),
        *(f"project={name}" for name in sorted(rights.projects or ())),
        *(f"base={name}" for name in sorted(rights.base_models or ())),
        *([] if rights.max_rank is None else [f"max-rank={rights.max_rank}"]),
        *(f"network={name}" for name in rights.networks or ()),
        *([] if key.expires_at is None else [f"expires={key.expires_at:%Y-%m-%dT%H:%M:%SZ}"]),
    ]
    rows = (f"{key.prefix}-…", _state(key, now), " ".join([rights.role, *bounds]), f"{key.created_at:%Y-%m-%d %H:%M}")
    return "\t".join([*rows, _use(key, now), key.note])


def _state(key: ApiKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "live"


def _use(key: ApiKey, now: datetime) -> str:
    if key.last_used_at is None:
        return "never used"
    told = f"used {key.last_used_at:%Y-%m-%d %H:%M}"
    return f"{told} (unused for {_UNUSED.days} days)" if key.last_used_at < now - _UNUSED else told
