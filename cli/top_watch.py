"""Looks at the service that ``weft top`` shows, once or one after another."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

import typer
from rich.console import Console
from rich.live import Live

from api.admin.overview import Overview
from cli.admin_client import AdminClient, open_admin
from cli.admin_command import door_of, ends_explained
from cli.global_options import options_of
from cli.top_view import frame
from contracts.errors import Unavailable


def watch(
    context: typer.Context, interval: float, window: int, *, once: bool, data: Path | None, as_json: bool
) -> None:
    """Show the service until Ctrl-C; without a terminal, or ``once``, show one look."""
    # FORCE_COLOR makes no terminal of a pipe, which would be watched for ever.
    console = Console(force_terminal=sys.stdout.isatty())
    with ends_explained(), open_admin(door_of(context, data)) as admin:
        first = _look(admin, window)
        if as_json or options_of(context).as_json:
            typer.echo(first.model_dump_json())
        elif once or not console.is_terminal:
            console.print(frame(first, rows=len(first.tenants)))
        else:
            _follow(admin, console, first, interval, window)


def _follow(admin: AdminClient, console: Console, seen: Overview, interval: float, window: int) -> None:
    """Show one look after another. While the service does not answer, the last look stays, with the reason."""
    trouble: str | None = None
    with Interrupt() as interrupt, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while not interrupt.has_come:
                live.update(frame(seen, rows=_room(console, seen), trouble=trouble), refresh=True)
                time.sleep(interval)
                try:
                    seen, trouble = _look(admin, window), None
                except Unavailable as error:
                    trouble = error.message
        except KeyboardInterrupt:
            return


class Interrupt:
    """Ctrl-C while this context is open. ``KeyboardInterrupt`` alone is lost where it is raised in a finalizer."""

    def __init__(self) -> None:
        self.has_come = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, place: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(number, place)


def _look(admin: AdminClient, window: int) -> Overview:
    return admin.get("/overview", Overview, window_seconds=window)


def _room(console: Console, seen: Overview) -> int:
    """Return how many tenants the terminal has room for, below and above the other tables."""
    others = len(seen.queue) + len(seen.trainers) + len(seen.pools) + len(seen.replicas)
    return max(3, console.height - others - 14)
