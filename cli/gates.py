"""``weft gate``: an operator pauses and resumes one adapter, or all sampling of a base model."""

from typing import Annotated

import typer
from sqlalchemy.ext.asyncio import AsyncSession

from cli.administration import on_database
from cli.options import DataOption, load_settings, run_or_explain
from contracts.errors import NotFound
from contracts.ids import TenantId
from store.database import Database
from store.database_clock import clock_of
from store.tables import Run
from tenants.gates import Gate, GateMode, Pause, gate_of, in_flight, pause_gate, pause_ttl, pool_gate, resume_gate

app = typer.Typer(help="Pause and resume sampling. A running service follows within seconds.", no_args_is_help=True)

AdapterOption = Annotated[str | None, typer.Option(help="The run whose adapter is meant.")]
PoolOption = Annotated[str | None, typer.Option(help="The base model, for itself and all its adapters.")]


@app.command("pause")
def pause(
    adapter: AdapterOption = None,
    pool: PoolOption = None,
    mode: Annotated[GateMode, typer.Option(help="Fate of the samples in flight.")] = GateMode.KEEP,
    reason: Annotated[str, typer.Option(help="Reason that `weft gate show` prints.")] = "",
    ttl: Annotated[
        float | None, typer.Option(help="Seconds after which the gate opens by itself [WEFT_PAUSE_TTL].")
    ] = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Have no sample read what replicas have cached of prompts so far.")
    ] = False,
    data: DataOption = None,
) -> None:
    """Close a gate: new samples wait. Samples in flight end (wait), are cut and go on later (keep), or end now (abort)."""
    settings = load_settings(data=data)

    async def change(database: Database) -> str:
        asked = Pause(mode, reason or None, pause_ttl(ttl, settings), clear_cache)
        clock = await clock_of(database)
        async with database.write() as transaction:
            key, tenant, base_model = await _named(transaction, adapter, pool)
            gate = await pause_gate(transaction, key, tenant=tenant, base_model=base_model, pause=asked, clock=clock)
            return _line(key, gate, await in_flight(transaction, key))

    typer.echo(run_or_explain(lambda: on_database(settings, change)))


@app.command("resume")
def resume(adapter: AdapterOption = None, pool: PoolOption = None, data: DataOption = None) -> None:
    """Open a gate. An open gate stays open."""

    async def change(database: Database) -> str:
        clock = await clock_of(database)
        async with database.write() as transaction:
            key, _, _ = await _named(transaction, adapter, pool)
            gate = await resume_gate(transaction, key, generation=None, clock=clock)
            return _line(key, gate, await in_flight(transaction, key))

    typer.echo(run_or_explain(lambda: on_database(load_settings(data=data), change)))


@app.command("show")
def show(adapter: AdapterOption = None, pool: PoolOption = None, data: DataOption = None) -> None:
    """Show a gate's state."""

    async def look(database: Database) -> str:
        clock = await clock_of(database)
        async with database.read() as session:
            key, _, _ = await _named(session, adapter, pool)
            return _line(key, await gate_of(session, key, clock), await in_flight(session, key))

    typer.echo(run_or_explain(lambda: on_database(load_settings(data=data), look)))


async def _named(session: AsyncSession, adapter: str | None, pool: str | None) -> tuple[str, TenantId | None, str]:
    """Return key, tenant and base model of the gate that the options name. Raises ``NotFound``, ``typer.BadParameter``."""
    if (adapter is None) == (pool is None):
        raise typer.BadParameter("give either --adapter or --pool")
    if pool is not None:
        return pool_gate(pool), None, pool
    run = await session.get(Run, adapter)
    if run is None:
        raise NotFound(f"no run {adapter!r}")
    return run.id, TenantId(run.tenant_id), run.base_model


def _line(key: str, gate: Gate, count: int) -> str:
    state = "open" if gate.mode is None else f"paused mode={gate.mode}"
    until = f" until={gate.expires_at:%Y-%m-%d %H:%M:%S}" if gate.expires_at else ""
    return f"{key}\t{state}\tgeneration={gate.generation} in_flight={count}{until} {gate.reason or ''}".rstrip()
