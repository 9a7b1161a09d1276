"""Greeting of a service that has started: its address, and at the very first start a key and a link that logs in.

Loads neither torch nor FastAPI: a cluster's supervisor greets, too.
"""

from cli.standard_output import say
from cli.ui import login_link
from store.clock import utc_now
from store.database import Database
from tenants.audit import Actor, Door, record, rights_told
from tenants.audit_actions import Action
from tenants.keys import create_key, named_key
from tenants.login_codes import GREETING_LIFE, make_code
from tenants.rights import KeyRights, Role
from tenants.tenant_names import create_tenant, list_tenants

FIRST_TENANT = "default"
READY = "ready; Ctrl-C finishes the pass in hand and ends"
"""The last line of the greeting."""
_MAKER = Actor(Door.SERVICE, "serve")


async def _make_first_key(database: Database) -> str | None:
    """Make a tenant and its key at the very first start and return the key's secret; None at later starts."""
    async with database.write() as transaction:
        if await list_tenants(transaction):
            return None
        tenant = await create_tenant(transaction, name=FIRST_TENANT, clock=utc_now)
        rights, note = KeyRights(Role.ADMIN), "made at first start"
        key = await create_key(transaction, tenant=tenant, note=note, clock=utc_now, rights=rights)
        now, told = utc_now(), rights_told(rights, note)
        await record(transaction, _MAKER, Action.TENANT_CREATE, tenant, tenant=tenant, now=now)
        await record(transaction, _MAKER, Action.KEY_CREATE, key.prefix, tenant=tenant, now=now, after=told)
        return key.secret


async def _make_first_link(database: Database, url: str, first_key: str | None) -> str:
    """Return the dashboard's address; at the very first start a link that logs in with the first key, once."""
    if first_key is None:
        return f"{url}/ui"
    async with database.write() as transaction:
        key = await named_key(transaction, first_key)
        code = await make_code(transaction, key.id, now=utc_now(), life=GREETING_LIFE)
    return login_link(url, code)


async def greet(database: Database, url: str) -> None:
    """Print the service's address, the dashboard's, and the variables that clients need.

    The first key is made here, once all is ready: one that was made before a start that fails would never be shown.
    """
    first_key = await _make_first_key(database)
    link = await _make_first_link(database, url, first_key)
    lines = [f"weft listens on {url}", f"dashboard: {link}", f"export TINKER_BASE_URL={url}"]
    if first_key is not None:
        lines.append(f"export TINKER_API_KEY={first_key}")
        lines.append(f"(the key of tenant {FIRST_TENANT!r}, shown only now; `weft key create` makes more)")
    else:
        lines.append("TINKER_API_KEY: a key made before, or a new one from `weft key create`")
    lines.append(READY)
    say("\n".join(lines))
