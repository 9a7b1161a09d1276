"""``weft usage``: shows a tenant's usage, exports it for a bill, and counts it again."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Annotated

import typer
from httpx2 import Headers

from api.admin.bodies import Listed
from api.admin.keys import OperatorsKeyBody
from api.admin.usage import TenantUsageBody, UsageVerification
from api.project_records import ProjectBody
from cli.acting import record_command
from cli.admin_client import AdminClient, open_admin, segment
from cli.admin_command import Shown, admin_command, door_of, ends_explained
from cli.administration import on_database
from cli.options import DataOption, load_settings
from cli.tenants import find_tenant, path_of
from cli.times import moment
from cli.usage_table import usage_sums, usage_table
from contracts.plurals import counted
from store.clock import utc_now
from store.database import Database
from tenants.audit_actions import Action
from tenants.tenant_names import find_tenant as tenant_named
from tenants.usage_documents import FINAL_BEFORE, Document, header
from tenants.usage_documents import lines as lines_of
from tenants.usage_exports import FINAL_AFTER, final_before, usage_records
from tenants.usage_hours import BucketWidth, Dimension

app = typer.Typer()


@app.command()
def export(
    since: Annotated[str, typer.Option(help="First hour (UTC): 2027-01-01 or 2027-01-01T12:00.")],
    before: Annotated[str | None, typer.Option(help="End (UTC). Default: now.")] = None,
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")] = "default",
    form: Annotated[Document, typer.Option("--format", help="FOCUS 1.2 as CSV, or CloudEvents as JSON lines.")] = (
        Document.FOCUS
    ),
    data: DataOption = None,
    *,
    context: typer.Context,
) -> None:
    """Print a tenant's usage of hours that change no more, a record for each meter and all that usage is told apart by."""
    with ends_explained():
        now = utc_now()
        end = now if before is None else moment(before, "--before", now)
        asked = _Asked(tenant, moment(since, "--since", now), end, form, now)
        door = door_of(context, data)
        if door.url is None:
            on_database(load_settings(data=data), asked.write)
        else:
            with open_admin(door) as admin:
                asked.copy(admin)


@dataclass(frozen=True, slots=True)
class _Asked:
    """An export that is asked for."""

    tenant: str
    since: datetime
    before: datetime
    form: Document
    now: datetime

    def copy(self, admin: AdminClient) -> None:
        """Print what the service answers, as it comes."""
        owner = find_tenant(admin, self.tenant).id
        window = {"since": self.since.isoformat(), "before": self.before.isoformat()}
        path = f"/tenants/{segment(owner)}/usage/export"
        for piece in admin.pieces(path, heard=self._heard, format=self.form, **window):
            sys.stdout.write(piece)

    async def write(self, database: Database) -> None:
        """Print the database's records page by page: an answer of this process would be held whole."""
        async with database.read() as session:
            owner = await tenant_named(session, name=self.tenant)
            final = await final_before(session, self.now)
        # First: who stops the document has read of it all the same.
        async with database.write() as transaction:
            told = {"since": self.since, "before": self.before, "format": self.form}
            await record_command(transaction, Action.USAGE_READ, "usage export", tenant=owner, after=told)
        self._tell(final)
        sys.stdout.write(header(self.form))
        async for page in usage_records(database, owner, since=self.since, before=min(self.before, final)):
            sys.stdout.write(lines_of(self.form, page))

    def _heard(self, headers: Headers) -> None:
        if (final := headers.get(FINAL_BEFORE)) is None:
            typer.echo("the service does not say which hours may still change", err=True)
        else:
            self._tell(datetime.fromisoformat(final))

    def _tell(self, final: datetime) -> None:
        """Say beside the document which hours are missing in it because they may still change."""
        if final < self.before:
            left = f"{max(final, self.since).astimezone(UTC):%Y-%m-%dT%H:%MZ}"
            typer.echo(f"hours from {left} on may still change and are left out", err=True)


@admin_command(app, "show")
def show(
    admin: AdminClient,
    tenant: Annotated[str, typer.Option(help="Name of the tenant.")] = "default",
    by: Annotated[list[Dimension] | None, typer.Option(help="What tells usage apart; as often as you like.")] = None,
    since: Annotated[
        str | None, typer.Option(help="First hour (UTC): 2027-01-01T12:00. Default: today's first.")
    ] = None,
    before: Annotated[str | None, typer.Option(help="End (UTC). Default: now.")] = None,
    every: Annotated[BucketWidth | None, typer.Option(help="Show each hour or day by itself.")] = None,
) -> Shown:
    """Show a tenant's usage up to the last answer, this hour's too, and what it cost."""
    now = utc_now()
    begin = moment(str(now.date()) if since is None else since, "--since", now)
    end = None if before is None else moment(before, "--before", now).isoformat()
    asked = {"since": begin.isoformat(), "before": end, "group_by": by or [], "bucket_width": every or BucketWidth.DAY}
    lines = admin.every(path_of(admin, tenant, "usage"), TenantUsageBody, **asked)
    sums = usage_sums(lines, is_by_time=every is not None)
    table = usage_table(sums, _names(admin, tenant, by or ()), by=by or (), is_by_time=every is not None)
    return Shown.of(Listed(items=sums), table)


def _names(admin: AdminClient, tenant: str, by: Sequence[Dimension]) -> dict[Dimension, dict[str, str]]:
    """Return what people call the projects and keys, where usage is told apart by them."""
    names: dict[Dimension, dict[str, str]] = {}
    if Dimension.PROJECT in by:
        projects = admin.page(path_of(admin, tenant, "projects"), ProjectBody).items
        names[Dimension.PROJECT] = {one.id: one.name for one in projects}
    if Dimension.KEY in by:
        keys = admin.every("/keys", OperatorsKeyBody, tenant_id=find_tenant(admin, tenant).id)
        names[Dimension.KEY] = {str(one.key_id): " ".join(filter(None, (one.prefix, one.note))) for one in keys}
    return names


@admin_command(app, "verify")
def verify(
    admin: AdminClient,
    day: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="Day (UTC).")],
) -> Shown:
    """Count a day's usage again, and exit with 1 if a sum differs.

    Days are counted from their hours, and hours from the operations, which are kept for WEFT_RETENTION_OPERATIONS.
    """
    found = admin.computed("/usage/verification", UsageVerification, day=day.date())
    lines = [
        f"{one.tenant}\t{one.table}\t{one.name}\t{one.told} told\t{one.counted} counted" for one in found.mismatches
    ]
    since = found.since.astimezone(UTC)
    again = f"{counted(found.operations, 'operation')} counted again from {since:%Y-%m-%dT%H:%MZ} on"
    if since.date() > found.day:
        again = "no operation counted again, since none is surely kept (WEFT_RETENTION_OPERATIONS)"
    lines.append(f"{found.day}: {len(found.mismatches)} sums differ; {counted(found.tenants, 'tenant')}, {again}")
    if utc_now() < datetime.combine(found.day, time(), UTC) + timedelta(days=1) + FINAL_AFTER:
        lines.append(
            f"{found.day}: not over; usage is added up some time after an operation's end, and checked from then on"
        )
    if not found.has_all_hours:
        lines.append(f"{found.day}: not counted again from its hours, some of which have expired")
    return Shown(found, lines, is_failure=bool(found.mismatches))
