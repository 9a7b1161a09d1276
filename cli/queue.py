"""``weft queue``: an operator sees what waits, who fills the queue, and which runs wait for a trainer."""

from typing import Annotated

import typer

from api.admin.queue import PlacementBody, QueueLine
from cli.admin_client import AdminClient
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption, LimitOption

app = typer.Typer()


@admin_command(app, "show")
def show(admin: AdminClient) -> Shown:
    """List what is pending by base model and kind: operations, tokens, age of the oldest, tenants that fill it."""
    found = admin.page("/queue", QueueLine)
    return Shown(found, [_line(one) for one in found.items])


@admin_command(app, "placements")
def placements(
    admin: AdminClient,
    base: Annotated[str | None, typer.Option(help="The base model; default: all.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List runs that have work and no trainer, in order of their ids: id, base model, since when."""
    found = admin.page("/placements", PlacementBody, base_model=base, limit=limit, after=after)
    lines = [f"{one.run_id}\t{one.base_model}\t{one.created_at:%Y-%m-%d %H:%M:%S}" for one in found.items]
    return Shown(found, lines)


def _line(one: QueueLine) -> str:
    filled = ", ".join(f"{filler.tenant} {filler.pending}" for filler in one.filled_by)
    more = one.tenants - len(one.filled_by)
    told = filled + (f" and {more} more" if more > 0 else "")
    counts = [f"{one.pending} pending", f"{one.tokens} tokens", f"oldest {one.oldest_seconds:.0f} s", told]
    return "\t".join([one.base_model, one.kind, *counts])
