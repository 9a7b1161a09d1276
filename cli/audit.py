"""``weft audit``: an operator reads the audit log, and proves that no entry was changed or removed."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated

import orjson
import typer

from api.admin.audit import AuditEntryBody, AuditVerification
from api.admin.bodies import MOST_ROWS, Listed
from api.admin.tenants import TenantBody
from cli.admin_client import AdminClient
from cli.admin_command import Shown, admin_command
from cli.tables import Table
from cli.tenants import find_tenant
from contracts.errors import InvalidRequest
from tenants.audit_actions import Action

app = typer.Typer()

DayOption = Annotated[str, typer.Option(help="Day of UTC, such as 2027-01-31.")]


@admin_command(app, "list")
def list_(
    admin: AdminClient,
    tenant: Annotated[str | None, typer.Option(help="Name of the tenant whose things it is about.")] = None,
    action: Annotated[list[Action] | None, typer.Option(help="Action; repeatable.")] = None,
    resource: Annotated[list[str] | None, typer.Option(help="Kind of thing, such as checkpoint; repeatable.")] = None,
    key: Annotated[str | None, typer.Option(help="First part of the key that did it.")] = None,
    day: DayOption = "",
    most: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="Most entries.")] = 100,
) -> Shown:
    """List entries, the newest first: time, tenant, actor, door, action, thing, outcome, what has changed."""
    since, until = _bounds(day) if day else (None, None)
    query: dict[str, object] = {
        "tenant": None if tenant is None else find_tenant(admin, tenant).id,
        "action": [one.value for one in action or []],
        "resource": resource or [],
        "key": key,
        "since": None if since is None else since.isoformat(),
        "until": None if until is None else until.isoformat(),
    }
    entries: list[AuditEntryBody] = []
    after: str | None = None
    while len(entries) < most:
        page = admin.page("/audit", AuditEntryBody, limit=min(most - len(entries), MOST_ROWS), after=after, **query)
        entries += page.items
        after = page.next
        if after is None:
            break
    names = {one.id: one.name for one in admin.every("/tenants", TenantBody)}
    rows = [_cells(entry, names) for entry in entries]
    lines = ["\t".join(row).rstrip() for row in rows]
    columns = ("time", "tenant", "actor", "door", "action", "thing", "outcome", "change")
    return Shown(Listed(items=entries, next=after), lines, tables=[Table(columns, rows)])


@admin_command(app, "verify")
def verify_(admin: AdminClient) -> Shown:
    """Compute every day's digest again. Exits with 1 when an entry was changed, added or removed.

    Keep the digest that this prints, or the security log, elsewhere: it is what shows that the last days were not cut off.
    """
    found = admin.computed("/audit/verification", AuditVerification)
    kept = "not as written" if found.problems else "as written"
    lines = [*found.problems, f"{kept}\tdays={found.days} entries={found.entries}"]
    if found.expired_to is not None:
        lines.append(f"expired\tup to {found.expired_to}")
    if found.last is not None:
        lines.append(f"newest digest\t{found.last.day}\t{found.last.digest}")
    return Shown(found, lines, is_failure=bool(found.problems))


def _bounds(day: str) -> tuple[datetime, datetime]:
    """Return a day's begin and end in UTC. Raises ``InvalidRequest``."""
    try:
        begin = datetime.combine(date.fromisoformat(day), time(), UTC)
        return begin, begin + timedelta(days=1)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"--day takes a day such as 2027-01-31; got {day[:50]!r}") from None


def _cells(entry: AuditEntryBody, names: Mapping[str, str]) -> list[str]:
    whose = "-" if entry.tenant_id is None else names.get(entry.tenant_id, entry.tenant_id)
    cells = [f"{entry.at:%Y-%m-%d %H:%M:%S}", whose, entry.actor, entry.door, entry.action, entry.resource_id]
    return [*cells, entry.outcome, _change(entry)]


def _change(entry: AuditEntryBody) -> str:
    before, after = ("" if one is None else orjson.dumps(one).decode() for one in (entry.before, entry.after))
    return f"{before} -> {after}" if before and after else before or after
