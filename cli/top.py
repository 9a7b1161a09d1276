"""``weft top``: the service at one glance, live in the terminal, over the admin API or on the database."""

from typing import Annotated

import typer

from cli.global_options import JsonOption
from cli.options import DataOption


def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    window: Annotated[int, typer.Option(min=1, max=3600, help="Seconds over which served tokens are counted.")] = 60,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end, as without a terminal.")] = False,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch tenants (what waits, what they got and are entitled to), the queue and the processes, until Ctrl-C."""
    # Imported late, so that `weft --help` stays quick.
    from cli.top_watch import watch

    watch(context, interval, window, once=once, data=data, as_json=as_json)
