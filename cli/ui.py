"""``weft ui``: opens the dashboard or the operators' pages, on the service's machine."""

from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict

from cli.acting import record_command
from cli.admin_command import Shown, check_is_here, show
from cli.administration import on_database
from cli.global_options import JsonOption, options_of
from cli.options import DataOption, load_settings, run_or_explain
from contracts.errors import InvalidRequest, Unauthenticated
from store.clock import utc_now
from store.database import Database
from store.settings import Settings
from tenants.audit_actions import Action
from tenants.key_reader import check_live
from tenants.keys import named_key
from tenants.login_codes import CODE_LIFE, make_code
from tenants.operator_sessions import make_operator_code

app = typer.Typer()


class LoginLink(BaseModel):
    """A link that logs in once, within so many seconds."""

    model_config = ConfigDict(frozen=True)

    link: str
    seconds: float


@app.callback()
def group() -> None:
    """Open the dashboard."""


@app.command("open")
def open_dashboard(
    key: Annotated[
        str, typer.Argument(envvar="TINKER_API_KEY", help="The key, or its first part.", show_envvar=True)
    ] = "",
    operator: Annotated[
        bool,
        typer.Option("--operator", help="Open the operators' pages, by an operator's key. Default: WEFT_ADMIN_KEY."),
    ] = False,
    address: Annotated[
        str, typer.Option(envvar="TINKER_BASE_URL", help="Address of the service. Default: as the settings have it.")
    ] = "",
    data: DataOption = None,
    as_json: JsonOption = False,
    *,
    context: typer.Context,
) -> None:
    """Print a link that logs a browser in to the dashboard with the key's rights, once, within 60 seconds."""
    check_is_here(context, data, "the service's database")
    settings = load_settings(data=data)

    def given(name: str, value: str, other: str | None) -> str:
        # The environment names a tenant's key and port, which are none of an operator's.
        source = context.get_parameter_source(name)
        return value if source is not None and source.name == "COMMANDLINE" else other or ""

    async def tenant_link(database: Database) -> str:
        made = await _tenant_code(database, _named(key, "an API key"))
        return login_link(address or settings.public_url or f"http://{settings.host}:{settings.port}", made)

    async def operator_link(database: Database) -> str:
        base = given("address", address, _admin_address(settings))
        if not base:
            raise InvalidRequest("the admin listener is off: set WEFT_ADMIN_PORT, or name its --address")
        named = _named(given("key", key, options_of(context).key), "an operator's key")
        return login_link(base, await _operator_code(database, named), pages="/ops")

    work = operator_link if operator else tenant_link
    link, seconds = run_or_explain(lambda: on_database(settings, work)), CODE_LIFE.total_seconds()
    show(Shown(LoginLink(link=link, seconds=seconds), [link]), context, as_json=as_json)
    typer.echo(f"(once, within {seconds:.0f} s)", err=True)


def _named(key: str, what: str) -> str:
    if not key:
        raise InvalidRequest(f"name {what}, or its first part")
    return key


def _admin_address(settings: Settings) -> str | None:
    return f"http://{settings.admin_host}:{settings.admin_port}" if settings.admin_port else None


async def _tenant_code(database: Database, key: str) -> str:
    async with database.write() as transaction:
        found = await named_key(transaction, key)
        now = utc_now()
        try:
            check_live(found, now)
        except Unauthenticated as ended:
            raise InvalidRequest(f"key {found.prefix} has ended; `weft key create` makes another") from ended
        made = await make_code(transaction, found.id, now=now)
        await record_command(transaction, Action.LOGIN_INVITE, found.prefix, tenant=found.tenant_id)
        return made


async def _operator_code(database: Database, key: str) -> str:
    async with database.write() as transaction:
        made, prefix = await make_operator_code(transaction, key, utc_now())
        await record_command(transaction, Action.LOGIN_INVITE, prefix, tenant=None)
        return made


def login_link(address: str, code: str, *, pages: str = "/ui") -> str:
    """Return the link that logs in with the code, which is in the fragment: no server and no log sees it."""
    return f"{address.rstrip('/')}{pages}/login#code={code}"
