"""``weft trainer`` and ``weft process``: list processes and those that died, drain a trainer, and have it take runs again."""

from typing import Annotated

import typer

from api.admin.bodies import ReasonBody
from api.admin.processes import ApiBody, DrainedTrainer, EndedBody, LastPassBody, PoolBody, TrainerBody
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command
from contracts.plurals import counted
from store.tables import PoolState

app = typer.Typer()
process_app = typer.Typer()

TrainerArgument = Annotated[str, typer.Argument(help="The trainer's id, or its beginning.")]


@admin_command(app, "list")
def list_all(admin: AdminClient) -> Shown:
    """List trainers: id, base model, host and pid, state, runs, those in memory, replays of the last hour.

    Then each one's last pass, its version of weft, and the reason of a drain.
    """
    found = admin.page("/trainers", TrainerBody)
    lines = ["\t".join([one.id, one.base_model, f"{one.host}:{one.pid}", *_state(one)]) for one in found.items]
    return Shown(found, lines)


@admin_command(app, "drain")
def drain(
    admin: AdminClient,
    trainer: TrainerArgument,
    reason: Annotated[str, typer.Option(help="Reason that `weft trainer list` shows.")] = "",
) -> Shown:
    """Have a trainer hand its runs to others in order, and take none. It can be ended once it has none."""
    found = admin.send("PUT", f"/trainers/{segment(trainer)}/drain", DrainedTrainer, ReasonBody(reason=reason))
    note = "" if found.others else f"\tno other trainer of {found.base_model} takes runs: their work waits for one"
    return Shown(found, [f"{found.id}\tgives up {counted(found.runs, 'run')}{note}"])


@admin_command(app, "work")
def work(admin: AdminClient, trainer: TrainerArgument) -> Shown:
    """Have a drained trainer take runs again."""
    found = admin.send("DELETE", f"/trainers/{segment(trainer)}/drain", TrainerBody)
    return Shown(found, [f"{found.id}\ttakes runs"])


@admin_command(process_app, "list")
def list_pools(admin: AdminClient) -> Shown:
    """List sampling processes: id, base model, host and pid, state, samples claimed and in flight."""
    found = admin.page("/pools", PoolBody)
    lines = [
        "\t".join(
            [
                one.id,
                one.base_model,
                f"{one.host}:{one.pid}",
                living_pool(one) if one.is_alive else "dead",
                f"{one.claimed} claimed",
                f"{one.in_flight} in flight",
            ]
        )
        for one in found.items
    ]
    return Shown(found, lines)


def living_pool(one: PoolBody) -> str:
    """Return the state of a sampling process that is alive, in the words of the other lists."""
    return "works" if one.state is PoolState.WORKING else one.state


@admin_command(process_app, "apis")
def list_apis(admin: AdminClient) -> Shown:
    """List API processes: id, host and pid, state, version of weft."""
    found = admin.page("/apis", ApiBody)
    lines = [
        f"{one.id}\t{one.host}:{one.pid}\t{'works' if one.is_alive else 'dead'}\t{one.release or '-'}"
        for one in found.items
    ]
    return Shown(found, lines)


@admin_command(process_app, "ended")
def list_ended(admin: AdminClient) -> Shown:
    """List processes that died in the last hour: id, base model, host and pid, time, and what others took over."""
    found = admin.page("/ended-processes", EndedBody)
    lines = [
        f"{one.id}\t{one.base_model or '-'}\t{one.host}:{one.pid}\t{one.ended_at:%Y-%m-%d %H:%M:%S}\t{_taken_over(one)}"
        for one in found.items
    ]
    return Shown(found, lines)


def _taken_over(one: EndedBody) -> str:
    told = [f"{counted(part.runs, 'run')} now with {part.trainer or 'no trainer'}" for part in one.taken_over]
    if one.samples:
        told.append(f"{counted(one.samples, 'sample')} begun anew")
    return ", ".join(told) or "nothing in hand"


def _state(one: TrainerBody) -> list[str]:
    state = "dead" if not one.is_alive else "works" if one.drained_at is None else "drained"
    memory = "-" if one.residents is None else f"{one.residents} in memory"
    return [
        state,
        counted(one.runs, "run"),
        memory,
        counted(one.replays, "replay"),
        _last_pass(one.last_pass),
        one.release or "-",
        one.reason or "",
    ]


def _last_pass(one: LastPassBody | None) -> str:
    if one is None:
        return "-"
    return f"{counted(one.tokens, 'token')} of {counted(one.tenants, 'tenant')}, {one.padding_share:.0%} padding"
