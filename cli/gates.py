"""``weft gate``: an operator pauses and resumes one adapter, or all sampling of a base model."""

from typing import Annotated

import typer

from api.admin.gates import GateBody, GateOf, PauseRequest
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from cli.options import AfterOption, LimitOption
from tenants.gates import GateMode

app = typer.Typer()

AdapterOption = Annotated[str | None, typer.Option(help="The run whose adapter is meant.")]
PoolOption = Annotated[str | None, typer.Option(help="The base model, for itself and all its adapters.")]


@admin_command(app, "pause")
def pause(
    admin: AdminClient,
    adapter: AdapterOption = None,
    pool: PoolOption = None,
    mode: Annotated[GateMode, typer.Option(help="Fate of the samples in flight.")] = GateMode.KEEP,
    reason: Annotated[str, typer.Option(help="Reason that `weft gate show` prints.")] = "",
    ttl: Annotated[
        float | None, typer.Option(min=0, help="Seconds after which the gate opens by itself (WEFT_PAUSE_TTL).")
    ] = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Have no sample read what replicas have cached of prompts so far.")
    ] = False,
) -> Shown:
    """Close a gate: new samples wait. Samples in flight end (wait), are cut and go on later (keep), or end now (abort)."""
    asked = PauseRequest(mode=mode, reason=reason, ttl_seconds=ttl, clear_cache=clear_cache)
    return _shown(admin.send("PUT", _path(adapter, pool), GateBody, asked))


@admin_command(app, "resume")
def resume(admin: AdminClient, adapter: AdapterOption = None, pool: PoolOption = None) -> Shown:
    """Open a gate. An open gate stays open."""
    return _shown(admin.send("DELETE", _path(adapter, pool), GateBody))


@admin_command(app, "show")
def show(admin: AdminClient, adapter: AdapterOption = None, pool: PoolOption = None) -> Shown:
    """Show a gate's state."""
    return _shown(admin.get(_path(adapter, pool), GateBody))


@admin_command(app, "list")
def list_all(
    admin: AdminClient,
    base: Annotated[str | None, typer.Option(help="Their base model.")] = None,
    limit: LimitOption = 50,
    after: AfterOption = None,
) -> Shown:
    """List the gates that are closed."""
    found = admin.page("/gates", GateBody, base_model=base, limit=limit, after=after)
    return Shown(found, [_line(one) for one in found.items])


def _path(adapter: str | None, pool: str | None) -> str:
    """Return the path of the gate that the options name. Raises ``typer.BadParameter``."""
    if (adapter is None) == (pool is None):
        raise typer.BadParameter("give either --adapter or --pool")
    of = GateOf.POOL if adapter is None else GateOf.ADAPTER
    return f"/gates/{of}/{segment(adapter or pool or '')}"


def _shown(gate: GateBody) -> Shown:
    return Shown(gate, [_line(gate)])


def _line(gate: GateBody) -> str:
    state = "open" if gate.mode is None else f"paused mode={gate.mode}"
    until = f" until={gate.expires_at:%Y-%m-%d %H:%M:%S}" if gate.expires_at else ""
    counts = f"generation={gate.generation} in_flight={gate.in_flight}"
    return f"{gate.key}\t{state}\t{counts}{until} {gate.reason or ''}".rstrip()
