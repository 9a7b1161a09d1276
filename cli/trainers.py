"""``weft trainer`` and ``weft process``: an operator lists processes, has a trainer give up its runs, and take runs again."""

from typing import Annotated

import typer

from api.admin.bodies import ReasonBody
from api.admin.processes import DrainedTrainer, LastPassBody, PoolBody, TrainerBody
from cli.admin_client import AdminClient, segment
from cli.admin_command import Shown, admin_command

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
    return Shown(found, [f"{found.id}\tgives up {found.runs} runs{note}"])


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
                one.state if one.is_alive else "dead",
                f"{one.claimed} claimed",
                f"{one.in_flight} in flight",
            ]
        )
        for one in found.items
    ]
    return Shown(found, lines)


def _state(one: TrainerBody) -> list[str]:
    state = "dead" if not one.is_alive else "works" if one.drained_at is None else "drained"
    memory = "-" if one.residents is None else f"{one.residents} in memory"
    return [
        state,
        f"{one.runs} runs",
        memory,
        f"{one.replays} replays",
        _last_pass(one.last_pass),
        one.release or "-",
        one.reason or "",
    ]


def _last_pass(one: LastPassBody | None) -> str:
    if one is None:
        return "-"
    return f"{one.tokens} tokens of {one.tenants} tenants, {one.padding_share:.0%} padding"
